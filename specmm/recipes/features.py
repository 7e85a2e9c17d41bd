"""Drafters that read the target's states and learn from their own drafts: EAGLE-3 heads (arXiv
2503.01840; ``eagle3``) and a target's own MTP layers (FastMTP, arXiv 2509.18362; ``mtp``).

In step k of a rollout every slot reads the state that step k - 1 predicted for its place, and
attends to the same slots as in drafting: slots with the target's states up to the root, and slots
of the drafts after it. All slots are rolled out at once.

Shape letters: B batch, L positions, M slots that count, F layers read, C width, v the head's
vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig

from specmm.core.randomness import seeded
from specmm.hf.drafters.eagle3_files import save_eagle3
from specmm.hf.drafters.eagle3_head import Eagle3Config, Eagle3Head, layers_read
from specmm.hf.drafters.mtp_layers import MtpLayers, layers_of, save_layers, told_layers
from specmm.hf.loading.pretrained import load_config
from specmm.hf.models.families import cache_name
from specmm.hf.models.target import VLMTarget
from specmm.recipes.loop import Losses
from specmm.recipes.losses import Head, of_drafts
from specmm.recipes.recipe import Count, Found, Recipe, Size
from specmm.recipes.settings import Targeted
from specmm.recipes.source import Source
from specmm.recipes.training.seen import Seen

CLIP = 0.5  # the norm at which gradients are clipped
RATE = 2.0  # over its width, a head's learning rate: 5e-4 at 4,096, too little for small ones
DECAY = 0.8  # a step of the rollout counts this share of the one before


def eagle3(
    *,
    model: str,
    source: Source,
    training: Targeted,
    rollout: Count,
    layers: Count,
    inner: Size,
    slots: Size,
    vocabulary: Size,
    recipe: Recipe,
) -> Found:
    """Train an EAGLE-3 head; the result is MODEL/drafters/eagle3."""
    begun = training.begun(model, "eagle3", recipe)
    lessons = source.lessons(begun)
    target = begun.target
    head = build_eagle3(target, layers, inner, lessons.vocabulary(vocabulary))
    rate: dict[str, Any] = {} if training.lr is not None else {"lr": head_rate(head)}
    output = target.family.logits_of(head.ids)
    loss = _loss(RolledEagle3(head), output, rollout, slots, training.loss)

    def save() -> None:
        begun.accepted(head, lessons)
        save_eagle3(head, begun.place, target.model)

    return begun.learn(lessons, head, loss, save, layers=head.config.layers, clip=CLIP, **rate)


def head_rate(head: Eagle3Head) -> float:
    """The default learning rate for a ``head``."""
    return RATE / int(head.config.sizes.hidden_size)


def mtp(
    *, model: str, source: Source, training: Targeted, rollout: Count, slots: Size, recipe: Recipe
) -> Found:
    """Fine-tune the MTP layers of a model's checkpoint; the result is MODEL/drafters/mtp."""
    begun = training.begun(model, "mtp", recipe)
    told_layers(load_config(begun.folder), begun.folder)  # or the target would answer first
    lessons = source.lessons(begun)
    target = begun.target
    layers = layers_of(target.model)
    rolled = RolledMtp(layers, target, rollout)
    loss = _loss(rolled, target.family.logits, rollout, slots, training.loss)
    save = partial(save_layers, layers, begun.place, target.model)
    return begun.learn(lessons, layers, loss, save, network=rolled.network, clip=CLIP)


def _loss(
    rolled: Rolled, output: Head, rollout: int, slots: int, loss: str
) -> Callable[[Seen, int], Losses]:
    """The loss of a step as a function of the target's states. At most ``slots`` random slots count
    (0: all), because a large vocabulary costs more than the layers.
    """

    def found(seen: Seen, step: int) -> Losses:
        mask = some_of(seen.mask, slots, step) if slots else seen.mask
        seen = dataclasses.replace(seen, mask=mask)
        return rollout_loss(rolled, output, seen, rollout, loss=loss)

    return found


@dataclass(frozen=True)
class RolledEagle3:
    """An EAGLE-3 ``head`` in training."""

    head: Eagle3Head

    def begin(self, seen: Seen) -> Tensor:
        """The states [B, L, C] that the first step reads, from the target's ``seen``."""
        return self.head.mixed(seen.context)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., v] of predicted ``states`` [..., C]."""
        return self.head.logits(states)

    def advance(self, step: int, embeddings: Tensor, hidden: Tensor, past: DynamicCache) -> Tensor:
        """States [B, L, C] that a ``step`` predicts after tokens with ``embeddings`` [B, L, C], in
        one pass over all slots.

        ``hidden`` [B, L, C] were predicted for the previous places; ``past`` holds the keys and
        values of all steps so far.
        """
        bias = rollout_bias(embeddings.shape[1], step).to(hidden)
        states: Tensor = self.head(self.head.slots(embeddings, hidden), None, bias, past)
        return states


class RolledMtp:
    """The MTP ``layers`` of ``target`` in training; methods as in :class:`RolledEagle3`.

    A single layer reads its own predictions in every step. Of several layers, each drafts one
    token: its slots read the previous layer's predictions, and attend to its own slots of the text.
    Raises ``ValueError`` for a ``rollout`` of more steps than such layers, and for layers with
    windows.
    """

    def __init__(self, layers: MtpLayers, target: VLMTarget, rollout: int) -> None:
        if 1 < layers.count < rollout:
            raise ValueError(
                f"rollout must be at most the {layers.count} MTP layers, got {rollout}; each "
                "drafts one token"
            )
        if any(layers.windows()):
            raise ValueError("trained MTP layers must have full attention, got a sliding window")
        self.layers = layers
        self.network: nn.Module = layers.model.layers.float().requires_grad_()
        self.target = target

    def begin(self, seen: Seen) -> Tensor:
        """The target's own states."""
        return seen.context

    def advance(self, step: int, embeddings: Tensor, hidden: Tensor, past: DynamicCache) -> Tensor:
        """One pass of the step's layer over all slots."""
        model = self.layers.model
        number = min(step, self.layers.count - 1)
        bias = rollout_bias(embeddings.shape[1], step if self.layers.count == 1 else 0)
        positions = torch.arange(1, embeddings.shape[1] + 1, device=embeddings.device)[None]
        states: Tensor = model.layers[number](
            embeddings,
            hidden,
            position_embeddings=model.rotary_emb(embeddings, position_ids=positions),
            attention_mask=bias.to(embeddings),
            position_ids=positions,
            **{cache_name(model.layers[number]): past},
        )
        return model.shared_post_norm(states) if model.use_shared_post_norm else states

    def logits(self, states: Tensor) -> Tensor:
        """The target's logits [..., V] of ``states`` [..., C]."""
        return self.target.family.logits(states)


Rolled: TypeAlias = RolledEagle3 | RolledMtp


def build_eagle3(
    target: VLMTarget, layers: int = 1, inner: int = 0, ids: Tensor | None = None
) -> Eagle3Head:
    """A head of ``layers`` for ``target`` that reads the usual three of its layers.

    ``inner`` is the width of its feed-forward layers (0: the target's), ``ids`` [v] the target's
    tokens that it drafts (None: all). Its tables are initialised with the target's rows.
    """
    chosen = layers_read(len(target.family.layers))
    sizes = layer_sizes(LlamaConfig, target, layers, inner)
    vocabulary = int(sizes.vocab_size)
    with seeded(0):
        tokens = vocabulary if ids is None else len(ids)
        head = Eagle3Head(Eagle3Config(sizes, chosen, tokens, picture_embeddings=True))
        spread(head, sizes)
    if ids is not None:
        head.set_ids(ids.cpu())
    rows = target.family.head.weight.detach()
    head.lm_head.weight.data.copy_(rows if head.ids is None else rows[head.ids.to(rows.device)])
    return head.to(target.device)


def layer_sizes(kind: Any, target: VLMTarget, layers: int, inner: int, **more: Any) -> Any:
    """A config of class ``kind`` for ``layers`` layers of a drafter, as wide as the ``target``'s,
    with feed-forward width ``inner`` (0: the target's); ``more`` are other sizes.
    """
    config = target.family.config
    heads = config.num_attention_heads
    sizes: dict[str, Any] = dict(
        vocab_size=target.family.vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=inner or target.family.inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=target.family.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=1e-6,
        initializer_range=0.04 if config.hidden_size < 512 else 0.02,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return kind(**sizes | more)


def spread(network: nn.Module, sizes: Any) -> None:
    """Initialise the matrices of ``network`` randomly, with the range in ``sizes``."""
    for weight in network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0, sizes.initializer_range)


def some_of(mask: Tensor, count: int, seed: int) -> Tensor:
    """``mask`` [B, L] reduced to at most ``count`` random places."""
    noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).to(mask.device)
    order = noise.masked_fill(~mask, 2).flatten().argsort()[:count]
    chosen = torch.zeros_like(mask).flatten()
    chosen[order] = True
    return chosen.view_as(mask) & mask


def rollout_loss(
    rolled: Rolled, output: Head, seen: Seen, rollout: int, decay: float = DECAY, loss: str = "kl"
) -> Losses:
    """The ``loss`` between the target's distributions over the drafter's tokens and the drafts of
    all steps.

    Also returns the overlaps Σ min(p, q) of the first and the last step: the probabilities that
    their drafts are accepted.
    """
    past = DynamicCache()
    hidden = rolled.begin(seen)
    drafted = []
    for k in range(rollout):
        states = rolled.advance(k, seen.embeddings, hidden, past)
        drafted.append(states[seen.mask])
        hidden = F.pad(states[:, :-1], (0, 0, 1, 0))
    truth = seen.hidden.roll(-1, 1)[seen.mask]
    losses, overlaps = of_drafts(loss, output, rolled.logits, truth, torch.stack(drafted, 1))
    weights = decay ** torch.arange(rollout, device=losses.device)
    overlap = {"overlap": overlaps[0], "overlap_last": overlaps[-1]}
    mean = (losses * weights).sum() / weights.sum()  # a product of matrices would be in bfloat16
    return {"loss": mean, **overlap, "count": seen.mask.sum()}


def rollout_bias(length: int, step: int) -> Tensor:
    """Additive mask [1, 1, L, (step + 1)·L] of the slots in a ``step`` of the rollout.

    Slot p began at place p - step: it attends to the first step's slots up to there and, of each
    later step, to the one slot of its own path.
    """
    query = torch.arange(length)[:, None]
    key = torch.arange(length)
    visible = [key <= query - step]
    visible += [key == query - step + i for i in range(1, step + 1)]
    bias = torch.zeros(length, (step + 1) * length)
    return bias.masked_fill_(~torch.cat(visible, dim=1), float("-inf"))[None, None]
