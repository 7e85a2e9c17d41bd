"""Before a LLaVA learns to answer, its projector learns to say each patch in words: the sum of
their embeddings.

What a patch shows then looks to the language model like the words for it ("heart", "red", "small",
"top", "left"), so that finding and naming things is matching and copying, which a deep and narrow
model learns soon.

Shape letters: B pictures, N patches, C width of the language model, V vocabulary, K classes of a
head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from recipes.scenes.kinds import COLOURS
from recipes.scenes.patches import HEADS, IGNORED, NAMES, labelled
from recipes.scenes.scenes import PLACES, SIZES
from recipes.scenes.stream import World
from recipes.training.llava import image_features
from specmm.recipes.loop import Losses, Run, fit

WORDS: dict[str, tuple[str, ...]] = {
    "kind": ("background", *NAMES[1:]),
    "colour": tuple(COLOURS),
    "size": tuple(SIZES),
    "place": tuple(
        " ".join(w for w in place.split() if w not in ("at", "in", "on", "the")) for place in PLACES
    ),
}


def train_projector(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    world: World,
    out: Path,
    *,
    steps: int,
    batch: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
    features: Callable[[Any, Tensor], Tensor] = image_features,
    patch: int = 0,
) -> None:
    """Teach the model's projector, in place, the words of each patch; resumes from ``out``.

    ``features`` makes of the tower and scenes [B, 3, R, R] what the projector reads, ``patch`` are
    a patch's pixels where they are not those of the tower's config.
    """
    projector = model.model.multi_modal_projector
    tower = model.model.vision_tower
    vision: Any = model.config.vision_config
    patch = patch or vision.patch_size
    embeddings: Tensor = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    tables = [
        word_counts(WORDS[head], tokenizer, len(embeddings)) @ embeddings for head in HEADS
    ]  # [K, C] each
    scale = embeddings.std()

    def step(i: int) -> Losses:
        pixels, labels = labelled(world, Random(f"align {seed} {i}"), batch, patch)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            seen = features(tower, pixels)
        said = projector(seen.float())
        return {"loss": F.mse_loss(said / scale, in_words(labels, tables) / scale)}

    fit(projector, step, Run(out, steps, lr))


def word_counts(
    phrases: tuple[str, ...], tokenizer: PreTrainedTokenizerFast, vocabulary: int
) -> Tensor:
    """How often each token is in each phrase [K, V]."""
    counts = torch.zeros(len(phrases), vocabulary)
    for row, phrase in zip(counts, phrases, strict=True):
        ids = torch.tensor(tokenizer.encode(phrase, add_special_tokens=False))
        row.index_add_(0, ids, torch.ones(len(ids)))
    return counts


def in_words(labels: Tensor, tables: list[Tensor]) -> Tensor:
    """The sum of the words' embeddings [B, N, C] of ``labels`` [B, N, heads]; what is ignored says
    nothing.
    """
    said = [
        table[labels[..., k].clamp(min=0)] * (labels[..., k] != IGNORED)[..., None]
        for k, table in enumerate(tables)
    ]
    return torch.stack(said).sum(0)
