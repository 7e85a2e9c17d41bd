"""Training of a small LLaVA: its tower learns what is where, its projector the words for it
(``align``), then all of it learns to answer.

The result is transformers' own ``LlavaForConditionalGeneration`` with its processor.

Shape letters: B rows, L tokens, N image tokens, P tokens before the first question, V vocabulary, R
pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from recipes.scenes.packing import Batch, Encoder, stack
from recipes.scenes.patches import HEADS, IGNORED, labelled
from recipes.scenes.questions import Turn
from recipes.scenes.scenes import R
from recipes.scenes.sprites import Array
from recipes.scenes.stream import World
from specmm.core.randomness import seeded
from specmm.recipes.loop import MUON, Losses, Run, fit

TEXT_EVERY = 12  # steps: one of so many is without pictures
NOTHING = 0.1  # weight of a patch without a thing
LENGTH = 224  # tokens of a row
TEXT_LENGTH = 160


@dataclass(frozen=True)
class Sizes:
    """Of the model: ``dim`` and ``layers`` of the language model, ``tower_dim`` and
    ``tower_layers`` of the tower.
    """

    dim: int = 128
    layers: int = 18
    heads: int = 4
    tower_dim: int = 192
    tower_layers: int = 4
    patch: int = 12

    @property
    def image_tokens(self) -> int:
        """N: image tokens a picture."""
        return (R // self.patch) ** 2


def build_model(
    sizes: Sizes, vocabulary: int, ids: Encoder, seed: int
) -> LlavaForConditionalGeneration:
    """A model with random weights. Raises ``ValueError`` when heads do not divide the width."""
    if sizes.dim % sizes.heads or sizes.dim // sizes.heads % 2:
        raise ValueError(
            f"width must be an even multiple of the heads, got {sizes.dim} and {sizes.heads}"
        )
    vision = CLIPVisionConfig(
        hidden_size=sizes.tower_dim,
        intermediate_size=3 * sizes.tower_dim,
        num_hidden_layers=sizes.tower_layers,
        num_attention_heads=max(sizes.tower_dim // 32, 1),
        image_size=R,
        patch_size=sizes.patch,
    )
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.dim,
        intermediate_size=-(-sizes.dim * 8 // 3 // 32) * 32,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=1024,
        initializer_range=0.04,  # the default is meant for wider models
        bos_token_id=ids.bos,
        eos_token_id=ids.eos,
        pad_token_id=ids.pad,
        tie_word_embeddings=True,  # what is read in words can be said in the same ones
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=ids.image,
        image_seq_length=sizes.image_tokens,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    with seeded(seed):
        model = LlavaForConditionalGeneration(config)
    _ready_to_match(model.model.language_model.layers)
    model.generation_config.update(bos_token_id=ids.bos, eos_token_id=ids.eos, pad_token_id=ids.pad)
    return model


@torch.no_grad()
def _ready_to_match(layers: Any) -> None:
    """Let attention begin by looking for what is alike (keys as queries) and copying it (outputs
    undo values).

    Pictures in words and questions share embeddings, so this finds the patch that is asked about
    from the start; from random weights a model this deep and narrow learns it late. What each
    branch adds is small at first (as in GPT-2).
    """
    small = (2 * len(layers)) ** -0.5
    for layer in layers:
        attention = layer.self_attn
        attention.q_proj.weight.mul_(2)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        attention.o_proj.weight.copy_(attention.v_proj.weight.T * (4 * small))
        layer.mlp.down_proj.weight.mul_(small)


class PatchClassifier(nn.Module):
    """The tower with linear heads that say, patch by patch, what ``HEADS`` lists."""

    def __init__(self, tower: nn.Module, dim: int) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(dim, sum(HEADS.values()))

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, N, classes] of each head for ``pixels`` [B, 3, R, R]."""
        return self.head(image_features(self.tower, pixels)).split(list(HEADS.values()), dim=-1)


def image_features(tower: nn.Module, pixels: Tensor) -> Tensor:
    """What the projector reads, [B, N, D], from ``pixels`` [B, 3, R, R]."""
    return tower(pixels).last_hidden_state[:, 1:]  # the class token is left out


def train_tower(
    model: LlavaForConditionalGeneration,
    world: World,
    held_out: World | None,
    out: Path,
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    evaluate_every: int = 200,
) -> None:
    """Teach the model's tower, in place, the kind, colour, size and place of what each patch shows.

    ``loss.csv`` has the share of things' patches whose kind is right, in training and (every
    ``evaluate_every`` steps) in ``held_out``.
    """
    vision: Any = model.config.vision_config
    with seeded(seed):
        classifier = PatchClassifier(model.model.vision_tower, vision.hidden_size)
    run = torch.compile(classifier)
    weights = [torch.ones(count) for count in HEADS.values()]
    weights[0][0] = NOTHING  # most patches show nothing and would drown the others
    seen = {"held out": torch.zeros(())} if held_out is not None else {}

    def step(i: int) -> Losses:
        if held_out is not None and i % evaluate_every == 0:
            with torch.no_grad():
                pixels, labels = labelled(held_out, Random(seed), batch, vision.patch_size)
                seen["held out"] = _kinds_right(run(pixels)[0], labels)
        pixels, labels = labelled(world, Random(f"tower {seed} {i}"), batch, vision.patch_size)
        with torch.autocast("cpu", torch.bfloat16):
            logits = run(pixels)
        parts = [
            F.cross_entropy(
                x.flatten(0, 1).float(), labels[..., k].flatten(), weights[k], ignore_index=IGNORED
            )
            for k, x in enumerate(logits)
            if bool((labels[..., k] != IGNORED).any())  # a mean of none is no number
        ]
        return {"loss": torch.stack(parts).sum(), "kind": _kinds_right(logits[0], labels), **seen}

    fit(classifier, step, Run(out, steps, lr), muon=MUON * lr)


def _kinds_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the patches with a thing whose kind ``logits`` [B, N, kinds] have right."""
    return (logits.argmax(-1) == labels[..., 0])[labels[..., 0] > 0].float().mean()


def train_target(
    model: LlavaForConditionalGeneration,
    encoder: Encoder,
    world: World,
    held_out: World | None,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
    vision: bool = False,
    evaluate_every: int = 200,
) -> None:
    """Train ``model`` in place to answer, its tower and projector only with ``vision``; resumes
    from ``out``.

    At the learning rate a language model begins with, Adam's steps would undo in no time what the
    tower knows.

    ``loss.csv`` has the share of wholly right short answers about ``held_out`` beside the loss,
    measured every ``evaluate_every`` steps.
    """
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.requires_grad_(vision)

    @torch.compile
    def logits_of(rows: Batch) -> Tensor:
        with sdpa_kernel(
            SDPBackend.MATH
        ):  # a fifth faster here than the fused kernel with its slow backward
            return answer_logits(model, rows)

    right: dict[str, Tensor] = {"scenes": torch.zeros(()), "easy": torch.zeros(())}

    def step(i: int) -> Losses:
        random = Random(f"target {seed} {i}")
        visual = i % TEXT_EVERY != TEXT_EVERY - 1
        length = LENGTH if visual else TEXT_LENGTH
        rows = stack([world.row(encoder, random, length, visual) for _ in range(batch)])
        if held_out is not None and i % evaluate_every == 0:
            right.update(short_accuracy(model, encoder, held_out, batch))
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(rows)
        return {"loss": answer_loss(logits, rows), **right}

    fit(model, step, Run(out, steps, lr), muon=MUON * lr)


def answer_logits(model: LlavaForConditionalGeneration, batch: Batch) -> Tensor:
    """Logits [B, L − P + 1, V] at the last token before the questions and at all after it."""
    return model.lm_head(answer_states(model, batch, image_features, 2))


def answer_states(
    model: LlavaForConditionalGeneration,
    batch: Batch,
    features: Callable[[Any, Tensor], Tensor],
    opening: int,
) -> Tensor:
    """The language model's states [B, L − P + 1, C] at the last token before the questions and at
    all after it.

    ``features`` makes of the tower and pictures what the projector reads; ``opening`` tokens stand
    before a picture.
    """
    embedded = model.get_input_embeddings()(batch.input_ids)  # [B, L, C]
    start = opening
    if batch.pixel_values is not None:
        seen = features(model.model.vision_tower, batch.pixel_values)
        image = model.model.multi_modal_projector(seen).to(embedded.dtype)  # [B, N, C]
        start += image.shape[1]
        embedded = torch.cat([embedded[:, :opening], image, embedded[:, start:]], dim=1)
    hidden = model.model.language_model(
        inputs_embeds=embedded,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).last_hidden_state
    return hidden[:, start - 1 :]


def answer_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy (nats) of the answers' tokens."""
    labels = batch.labels[:, -logits.shape[1] :]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def short_accuracy(
    model: LlavaForConditionalGeneration,
    encoder: Encoder,
    world: World,
    pictures: int,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Share of short answers that greedy decoding gets wholly right, for ``pictures`` scenes and as
    many of easy-VQA.

    Read off one forward: decoding greedily gives an answer exactly when each of its tokens is the
    likeliest.
    """
    random = Random(seed)
    asked: dict[str, list[tuple[Array, Sequence[Turn]]]] = {"scenes": [], "easy": []}
    for _ in range(pictures):
        scene, turns = world.scene(random)
        asked["scenes"].append((scene.image, turns[1:]))  # without the description
        example = random.choice(world.easy)
        asked["easy"].append((example.image, example.turns))
    batches = {
        k: stack([encoder.side_by_side(t, image, LENGTH) for image, t in v])
        for k, v in asked.items()
    }
    return {k: whole_answers(answer_logits(model, b), b).float().mean() for k, b in batches.items()}


def whole_answers(logits: Tensor, batch: Batch) -> Tensor:
    """For every answer of the batch, whether all its tokens are the likeliest, [answers] bool."""
    labels = batch.labels[:, -logits.shape[1] :]
    asked = labels >= 0
    segments = batch.segments[:, -logits.shape[1] :].roll(-1, 1)  # of the token predicted
    answer = segments + torch.arange(len(labels))[:, None] * (int(segments.max()) + 1)
    _, answer = answer[asked].unique(return_inverse=True)
    wrong = torch.zeros(int(answer.max()) + 1).index_add_(
        0, answer, (logits.argmax(-1) != labels)[asked].float()
    )
    return wrong == 0


def save_model(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path
) -> None:
    """Write model (bf16) and processor as transformers loads them; ``model`` itself is left in
    bf16.
    """
    half: Any = model.eval()
    half.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
