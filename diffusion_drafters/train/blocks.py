"""Learning to draft blocks: many anchors a row, each with a block that sees the text before it and
itself only.

A block predicts the tokens after its anchor all at once. It learns the target's distribution at
each of them given the real tokens in between, so on average what is drafted without them.

Shape letters: B batch, L tokens of a row, A anchors, K drafts of a block, N positions of all
blocks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.training import Losses


@dataclass(frozen=True)
class Anchors:
    """``places`` [B, A] of the last token before each block; ``size`` positions of a block go
    through the network.
    """

    places: Tensor
    size: int

    @classmethod
    def draw(cls, rows: int, length: int, count: int, block: int, size: int, seed: int) -> Anchors:
        """Random places that leave room for ``block`` drafts. Raises ``ValueError`` for rows too
        short for one.
        """
        if length <= block:
            raise ValueError(f"rows must be longer than a block of {block}, got {length} tokens")
        uniforms = torch.Generator().manual_seed(seed)
        return cls(torch.randint(length - block, (rows, count), generator=uniforms), size)

    def behind(self, count: int, first: int = 0) -> Tensor:
        """The ``count`` positions from ``first`` after each anchor [B, A, count]."""
        return self.places[..., None] + first + torch.arange(count, device=self.places.device)

    def bias(self, length: int, seen: int, present: Tensor | None = None) -> Tensor:
        """Additive mask [B, 1, N, L + N] of the blocks: the row up to ``seen`` places after the
        anchor, and the own block, of which those that are ``present`` [B, A, size].
        """
        rows, count = self.places.shape
        owner = torch.arange(count, device=self.places.device).repeat_interleave(self.size)  # [N]
        text = (
            torch.arange(length, device=owner.device) <= (self.places[:, owner] + seen)[..., None]
        )  # [B, N, L]
        own = (owner == owner[:, None]).expand(rows, -1, -1)
        if present is not None:
            eye = torch.eye(len(owner), dtype=torch.bool, device=owner.device)
            own = own & (
                present.flatten(1)[:, None] | eye
            )  # an absent position sees itself: softmax of something
        open_ = torch.cat([text, own], dim=-1)
        return torch.zeros(open_.shape, device=owner.device).masked_fill_(~open_, float("-inf"))[
            :, None
        ]


Head = Callable[[Tensor], Tensor]  # from states [..., C] to logits [..., V]


def probs_loss(
    states: Tensor, wanted: Tensor, weights: Tensor, output: Head, pairs: Tensor | None = None
) -> Losses:
    """Cross-entropy (nats) of the distributions of ``states`` [B, A, K, C] against those of the
    target's ``wanted`` states.

    ``weights`` [K] or [B, A, K] say how much each position counts. ``output`` is the head;
    ``pairs`` [B, A, K, V] is added to the logits of ``states``. Beside the loss: ``first`` and
    ``last``, the overlaps Σ min(p, q) at the block's ends, what a draft there is accepted with.
    """
    with torch.no_grad():
        probs = output(wanted).float().softmax(-1)  # [B, A, K, V]
    logits = output(states).float()
    drafted = (logits if pairs is None else logits + pairs).log_softmax(-1)
    surprise = -(probs * drafted).sum(-1)  # [B, A, K]
    weights = weights.expand_as(surprise)
    with torch.no_grad():
        overlap = torch.minimum(probs, drafted.exp()).sum(-1).mean((0, 1))
    loss = (surprise * weights).sum() / weights.sum()
    return {"loss": loss, "first": overlap[0], "last": overlap[-1]}


def fading(count: int, length: float) -> Tensor:
    """Weights [K] exp(-k / ``length``): later drafts count less, for they need all before them
    (DFlash).
    """
    return torch.exp(-torch.arange(count) / length)
