"""The scales of a next-scale model (VAR's ``patch_nums``): square token grids of growing side.

Shape letters: K scales, L tokens of all scales, T queries, S keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

PATCHES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
PATCHES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)


@dataclass(frozen=True)
class ScaleSchedule:
    """Scales k = 0 … K-1 with ``sides[k]``² tokens each, coarse to fine."""

    sides: tuple[int, ...]

    def __post_init__(self) -> None:
        grows = all(a < b for a, b in pairwise(self.sides))
        if not self.sides or self.sides[0] < 1 or not grows:
            raise ValueError(f"patch_nums must be growing sides from 1 on, got {self.sides}")

    def __len__(self) -> int:
        return len(self.sides)

    @cached_property
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
        """Concatenated tokens [..., T] of the first scales, as one tensor [..., p²] for each."""
        counts = [self.tokens(k) for k in range(self.starts.index(tokens.shape[-1]))]
        return tokens.split(counts, dim=-1)


def scale_bias(queries: Tensor, keys: Tensor) -> Tensor:
    """Additive block-causal mask [1, 1, T, S] of levels [1, T] and [1, S].

    A position attends its own scale and the coarser ones.
    """
    hidden = queries[0, :, None] < keys[0]
    bias = torch.zeros(hidden.shape, dtype=torch.float32, device=keys.device)
    return bias.masked_fill_(hidden, -math.inf)[None, None]
