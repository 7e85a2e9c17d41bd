"""The schedule of scales a next-scale model climbs: grids of growing sides, their tokens one after
the other.

Shape letters: K scales, L tokens of all scales together, T queries, S keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

PATCHES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
PATCHES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)


@dataclass(frozen=True)
class ScaleSchedule:
    """Scales k = 0 … K-1 with ``sides[k]``² tokens each, coarse to fine."""

    sides: tuple[int, ...]

    def __post_init__(self) -> None:
        grows = all(a < b for a, b in zip(self.sides, self.sides[1:], strict=False))
        if not self.sides or self.sides[0] < 1 or not grows:
            raise ValueError(f"patch_nums must be growing sides from 1 on, got {self.sides}")

    def __len__(self) -> int:
        return len(self.sides)

    @property
    def starts(self) -> tuple[int, ...]:
        """First token of each scale, and L at the end: K + 1 numbers."""
        return tuple(accumulate((s * s for s in self.sides), initial=0))

    @property
    def length(self) -> int:
        """L."""
        return self.starts[-1]

    def tokens(self, k: int) -> int:
        """Tokens of scale ``k``."""
        return self.sides[k] ** 2

    @property
    def levels(self) -> Tensor:
        """The scale of each position [1, L]."""
        return torch.cat([torch.full((self.tokens(k),), k) for k in range(len(self))])[None]

    def split(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Tokens [..., T] of the first scales, laid end to end, as one tensor [..., p²] a scale."""
        counts = [self.tokens(k) for k in range(self.starts.index(tokens.shape[-1]))]
        return tokens.split(counts, dim=-1)


def scale_bias(queries: Tensor, keys: Tensor) -> Tensor:
    """Additive mask [1, 1, T, S] of levels [1, T] and [1, S]: a level sees itself and the coarser
    ones.
    """
    hidden = queries[0, :, None] < keys[0]
    return torch.zeros(hidden.shape, device=keys.device).masked_fill_(hidden, -math.inf)[None, None]
