"""Learning to draft blocks: many anchors a row, each with a block of drafts after it.

A block attends to the text up to its anchor and to itself, and predicts all tokens after the anchor
at once. For each token it learns the target's distribution given the real tokens in between.

Shape letters: B batch, L tokens of a row, A anchors, K drafts of a block, N positions of all
blocks, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.diffusion_drafters.models.block_memory import BlockMemory
from specmm.diffusion_drafters.models.dflash_config import Reach
from specmm.recipes.loop import Losses
from specmm.recipes.losses import Head, compared

ANCHORS = 16  # blocks a row


@dataclass(frozen=True)
class Anchors:
    """``places`` [B, A] of the last token before each block; blocks have ``size`` positions."""

    places: Tensor
    size: int

    @classmethod
    def draw(cls, learnt: Tensor, count: int, block: int, size: int, seed: int) -> Anchors:
        """``count`` random places in each row as anchors of blocks of ``size`` positions. Each is
        followed by ``block`` tokens, the first of which is ``learnt`` [B, L] if the row has such
        tokens. Raises ``ValueError`` for rows that are too short.
        """
        length = learnt.shape[1]
        if length <= block:
            raise ValueError(f"rows must be longer than a block of {block}, got {length} tokens")
        generator = torch.Generator().manual_seed(seed)
        chances = learnt[:, 1 : length - block + 1].float()
        chances += ~chances.any(1, keepdim=True)
        return cls(torch.multinomial(chances, count, True, generator=generator), size)

    def after(self, count: int, first: int = 0) -> Tensor:
        """The ``count`` positions from ``first`` after each anchor [B, A, count]."""
        return self.places[..., None] + first + torch.arange(count, device=self.places.device)

    def bias(self, length: int, seen: int, present: Tensor | None = None) -> Tensor:
        """Additive mask [B, 1, N, L + N] of the blocks.

        They attend to the row up to ``seen`` places after the anchor, and to the ``present`` [B, A,
        size] positions of their own block.
        """
        rows, count = self.places.shape
        device = self.places.device
        owner = torch.arange(count, device=device).repeat_interleave(self.size)  # [N]
        last = self.places[:, owner] + seen
        text = torch.arange(length, device=device) <= last[..., None]  # [B, N, L]
        same_block = (owner == owner[:, None]).expand(rows, -1, -1)
        if present is not None:
            # An absent position sees itself, for a softmax needs something.
            eye = torch.eye(len(owner), dtype=torch.bool, device=device)
            same_block = same_block & (present.flatten(1)[:, None] | eye)
        allowed = torch.cat([text, same_block], dim=-1)
        bias = torch.zeros(allowed.shape, device=device)
        return bias.masked_fill_(~allowed, float("-inf"))[:, None]

    def reached(self, length: int, reach: Reach) -> Tensor:
        """The part of :meth:`bias` for the text before the anchors, closed beyond ``reach``."""
        position = self.after(self.size).flatten(1)  # [B, N]
        text = torch.arange(length, device=position.device).expand(len(position), -1)
        keys = torch.cat([text, position], 1)[:, None]  # [B, 1, L + N]
        block = torch.arange(keys.shape[-1], device=position.device) >= length
        unseen = block & (keys > position[..., None]) & reach.causal
        if reach.past is not None:
            first = position if reach.moving else self.places.repeat_interleave(self.size, 1)
            unseen = unseen | (~block & (keys < first[..., None] - reach.past))
            away = (keys - position[..., None]).abs() > reach.past
            unseen = unseen | (block & away & reach.moving)
        return self.bias(length, -1).masked_fill_(unseen[:, None], float("-inf"))


def probs_loss(
    states: Tensor,
    wanted: Tensor,
    weights: Tensor,
    output: Head,
    pairs: Tensor | None = None,
    loss: str = "kl",
) -> Losses:
    """The ``loss`` between the target's distributions and the drafter's.

    ``states`` [B, A, K, C] are the drafter's, ``wanted`` [B, A, K, C] the target's, and ``output``
    is the head. ``weights`` [K] or [B, A, K] weigh the positions; ``pairs`` [B, A, K, V] is added
    to the drafter's logits. Also returns ``first`` and ``last``, the overlaps Σ min(p, q) at the
    block's ends: a draft's probability of acceptance there.
    """
    with torch.no_grad():
        target = output(wanted)  # [B, A, K, V]
    logits = output(states)
    losses, overlaps = compared(loss, target, logits if pairs is None else logits.float() + pairs)
    weights = weights.expand_as(losses)
    overlap = overlaps.mean((0, 1))
    count = weights.sum()
    mean = (losses * weights).sum() / count.clamp(min=1e-6)
    return {"loss": mean, "first": overlap[0], "last": overlap[-1], "count": count}


def fading(count: int, length: float) -> Tensor:
    """Weights [K] exp(-k / ``length``): a later draft counts less, as it needs all before it."""
    return torch.exp(-torch.arange(count) / length)


def along(memory: BlockMemory, states: Tensor, embeddings: Tensor) -> Tensor:
    """``states`` [B, A, K, C] plus the memory of earlier tokens' ``embeddings`` [B, A, K, C]."""
    latest = None
    result = []
    tokens = memory.read(embeddings).unbind(2)
    for place, token in zip(memory.places(states).unbind(2), tokens, strict=True):
        state, latest = memory(place, token, latest)
        result.append(state)
    return torch.stack(result, dim=2)


@torch.no_grad()
def silence(memory: BlockMemory) -> None:
    """Set an untrained ``memory`` to add nothing."""
    memory.place.bias.zero_()
    memory.out.weight.zero_()
