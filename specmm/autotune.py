"""Whether to speculate, and with which tree: from seconds measured on this machine, falling back to plain decoding.

The speedup of a round over plain decoding is S = tau * step / (draft + verify + host): tau tokens for the drafter's
levels, one forward of the target over N nodes and the host's share. A tree is taken only if S clears a margin, so that
turning speculation on is never slower than the baseline beyond noise. Nothing here knows a model.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specmm.shape.expected import Acceptance, expected_tau
from specmm.tree import TreeShape

Table = Mapping[int, float] | Callable[[int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine.

    ``draft`` by levels drafted (the tree's depth), ``verify`` by nodes scored in one target forward (root included),
    ``step`` one step of plain decoding, ``host`` what else a round of speculation takes. A table is interpolated
    between its sizes and continued along its last two.
    """

    draft: Table
    verify: Table
    step: float
    host: float = 0.0

    def __post_init__(self) -> None:
        if self.step <= 0:
            raise ValueError(f"step must be positive seconds, got {self.step}")
        if self.host < 0:
            raise ValueError(f"host must be at least 0 seconds, got {self.host}")

    def round(self, nodes: int, depth: int) -> float:
        """Seconds of one round that drafts ``depth`` levels and verifies ``nodes`` nodes."""
        return lookup(self.draft, depth) + lookup(self.verify, nodes) + self.host


@dataclass(frozen=True)
class Plan:
    """What to run: ``shape`` (None for plain decoding), what it should bring, and why in words."""

    shape: TreeShape | None
    expected_tau: float
    expected_speedup: float
    reason: str


def plan(costs: Costs, rank_acceptance: Acceptance, candidates: Sequence[TreeShape], margin: float = 0.05) -> Plan:
    """The candidate with the largest expected speedup, or plain decoding if none is above 1 + ``margin``.

    ``rank_acceptance`` [K] or [D, K] is positional (``specmm.shape.expected``). Equal speedups go to the earlier one.
    """
    if margin < 0:
        raise ValueError(f"margin must be at least 0, got {margin}")
    best: Plan | None = None
    for shape in candidates:
        tau = float(expected_tau(shape, rank_acceptance).mean())
        speedup = tau * costs.step / costs.round(shape.size, shape.depth)
        if best is None or speedup > best.expected_speedup:
            text = f"{shape.size} nodes, depth {shape.depth}: tau {tau:.2f}, {speedup:.2f}x plain decoding expected"
            best = Plan(shape, tau, speedup, text)
    if best is None:
        return Plan(None, 1.0, 1.0, "plain decoding: no candidate tree")
    if best.expected_speedup <= 1 + margin:
        return Plan(None, 1.0, 1.0, f"plain decoding: best candidate ({best.reason}) does not exceed {1 + margin:.2f}x")
    return best


def lookup(table: Table, size: int) -> float:
    """Seconds at ``size``: linear between the sizes measured, constant below them, on along the last slope above."""
    if callable(table):
        return table(size)
    if not table:
        raise ValueError("cost table must hold at least one size, got none")
    sizes = sorted(table)
    if size <= sizes[0] or len(sizes) == 1:
        return table[sizes[0]]
    right = min(bisect_left(sizes, size), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    slope = (table[high] - table[low]) / (high - low)
    if size > high:
        return table[high] + max(slope, 0.0) * (size - high)
    return table[low] + slope * (size - low)


def measure(fn: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median seconds of ``fn()`` over ``repeats`` calls after ``warmup`` uncounted ones, waiting for a GPU in use."""
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    on_gpu: bool = torch.cuda.is_initialized()
    wait = torch.cuda.synchronize if on_gpu else _nothing
    for _ in range(warmup):
        fn()
    seconds = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        fn()
        wait()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _nothing() -> None:
    """No device to wait for."""
