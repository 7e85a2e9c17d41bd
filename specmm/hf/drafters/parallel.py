"""P-EAGLE: all drafts of a round in one pass of the head.

Slots of a mask token follow the slots of the committed tokens. The state at the last committed slot
predicts the first draft, and the state at mask i predicts draft i + 1, independently of the drafts
before it: all nodes of a level have the same distribution. Source: P-EAGLE (arXiv 2602.01469).

Shape letters: B batch, M slots committed at most in a round, K masks, n nodes, C width, S slots of
the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from specmm.core.cache import Cache

Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # slots, positions, bias to states


class MaskedPass:
    """Runs committed slots, followed by masks for ``depth`` drafts, and stores the masks' states.

    ``mask`` [1, 1, ...] is the slot of a mask; ``run`` runs the network and writes its slots where
    the cache points.
    """

    state: ClassVar[tuple[str, ...]] = ("order", "bias")

    def __init__(self, mask: Tensor, depth: int, run: Run) -> None:
        self.mask = mask
        self.count = depth - 1  # K: the first draft comes from the last committed slot
        self.committed = depth + 1  # M
        self.run = run

    @property
    def scratch(self) -> int:
        """Slots a round needs after the committed ones."""
        return self.committed + self.count

    def begin(self, cache: Cache) -> None:
        """Start a batch with its ``cache``: make the mask of attention."""
        self.cache = cache
        closed = float("-inf")
        rows = cache.size.batch
        order = torch.arange(self.scratch, device=cache.lengths.device)
        self.order = order
        shape = (rows, 1, self.scratch, cache.slots)
        self.bias = torch.full(shape, closed, dtype=cache.dtype, device=order.device)
        first = cache.size.capacity + self.committed
        after = order[: self.count, None] >= order[: self.count]
        masks = self.bias[:, 0, self.committed :, first : first + self.count]
        masks.masked_fill_(after, 0)

    def read_alone(self) -> None:
        """Run only the masks, after the prompts in the cache."""
        cache = self.cache
        cache.aim(cache.size.capacity + self.committed, cache.slots)
        positions = self._masks(cache.lengths - 1, torch.zeros_like(cache.lengths))
        self.states = self.run(self._slots(), positions, self.bias[:, :, self.committed :])

    def read(self, slots: Tensor, positions: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
        """States [B, M, C] of committed ``slots`` [B, M, ...] at ``positions`` [B, M] under
        ``bias`` [B, 1, M, S]; only the first ``kept`` [B] slots are real. The masks run in the same
        pass.
        """
        self.bias[:, :, : self.committed].copy_(bias)
        last = positions.gather(1, kept.clamp(min=1)[:, None] - 1)[:, 0]
        where = torch.cat([positions, self._masks(last, kept)], dim=1)
        states = self.run(torch.cat([slots, self._slots()], dim=1), where, self.bias)
        self.states = states[:, self.committed :]
        return states[:, : self.committed]

    def after(self, depth: int, nodes: int) -> Tensor:
        """States [B, n, C] of the ``nodes`` n at ``depth`` from 1 on."""
        return self.states[:, depth - 1 : depth].expand(-1, nodes, -1)

    def _slots(self) -> Tensor:
        return self.mask.expand(self.cache.size.batch, self.count, -1)

    def _masks(self, last: Tensor, kept: Tensor) -> Tensor:
        """Positions [B, K] after ``last`` [B]; opens ``kept`` [B] committed slots to the masks."""
        capacity = self.cache.size.capacity
        masks = self.bias[:, 0, self.committed :]
        masks[..., :capacity] = self.cache.prefix_bias()[:, None]
        fresh = self.order[: self.committed] < kept[:, None]
        closed = torch.zeros_like(fresh, dtype=masks.dtype).masked_fill_(~fresh, float("-inf"))
        masks[..., capacity : capacity + self.committed] = closed[:, None]
        return last[:, None] + 1 + self.order[: self.count]
