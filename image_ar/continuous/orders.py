"""In which order a picture's tokens are made, how many at each iteration, and how much guidance
they get.

Source: MAR (arXiv 2406.11838, sections 3.4-3.5 and the release's cosine schedule). Shape letters: B
pictures, L tokens, n iterations. An order is run from its end: its last entries are made first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

CFGSchedule = Literal["linear", "constant"]


def random_orders(generators: Sequence[torch.Generator], length: int) -> Tensor:
    """One permutation of 0 … L-1 a picture, from its own generator: [B, L] int64."""
    return torch.stack([torch.randperm(length, generator=g, device=g.device) for g in generators])


def mask_lengths(length: int, iterations: int) -> list[int]:
    """How many tokens are still unknown after each of n iterations, but the last, which makes all
    that are left.

    The cosine schedule, where every iteration makes one token at least and leaves one to the last.
    With more iterations than tokens it stays at 1: such iterations make nothing.
    """
    if iterations < 1:
        raise ValueError(f"num_iter must be at least 1, got {iterations}")
    lengths, left = [], length
    for k in range(iterations):
        wanted = math.floor(length * math.cos(math.pi / 2 * (k + 1) / iterations))
        left = max(1, min(left - 1, wanted))
        lengths.append(left)
    return lengths


@dataclass(frozen=True)
class Iteration:
    """The part [``first``, ``last``) of the orders that is made, under the guidance ``scale``."""

    first: int
    last: int
    scale: float


def iterations(
    length: int, count: int, cfg: float = 1.0, schedule: CFGSchedule = "linear"
) -> list[Iteration]:
    """The iterations that make any tokens, from part (…, L) of the orders down to (0, …)."""
    left = mask_lengths(length, count)
    bounds = list(pairwise([length, *left[:-1], 0]))
    return [
        Iteration(first, last, guidance(schedule, cfg, length, n))
        for (last, first), n in zip(bounds, left, strict=True)
        if first < last
    ]


def guidance(schedule: CFGSchedule, cfg: float, length: int, left: int) -> float:
    """The guidance scale of an iteration that leaves ``left`` tokens by its mask length (1 at the
    last).

    ``linear`` rises from 1 to nearly ``cfg`` as tokens become known; ``constant`` is ``cfg``
    throughout.
    """
    if schedule not in ("linear", "constant"):
        raise ValueError(f"cfg_schedule must be 'linear' or 'constant', got {schedule!r}")
    return cfg if schedule == "constant" else 1 + (cfg - 1) * (length - left) / length
