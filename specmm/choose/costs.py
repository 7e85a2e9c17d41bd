"""Predicts the fastest tree from seconds and acceptance: for traced drafters and for other
machines.

The speedup of a round over plain decoding is S = tau * step / (draft + verify + host): tau tokens
for the seconds of drafting the levels, of one target forward over N nodes, and of the host.

Shape letters: D levels, K ranks.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from specmm.choose.contest import PLAIN, Record
from specmm.core.stats import total
from specmm.core.tree import TreeShape
from specmm.shape.sequoia import Acceptance, expected_tau

NOISE = 1.03  # speedups nearer to one another than this factor count as equal
Table: TypeAlias = Mapping[int, float] | Callable[[int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine.

    ``draft`` by levels drafted (the tree's depth), ``verify`` by nodes scored in one target forward
    (root included), ``step`` one step of plain decoding, ``host`` everything else in a round. A
    table is interpolated between its sizes and continued along its last two.
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


def lookup(table: Table, size: int) -> float:
    """Seconds at ``size``: linear between the measured sizes and beyond, constant below."""
    if callable(table):
        return table(size)
    if not table:
        raise ValueError("cost table must hold at least one size, got none")
    sizes = sorted(table)
    if size <= sizes[0] or len(sizes) == 1:
        return table[sizes[0]]
    right = min(bisect_left(sizes, size), len(sizes) - 1)
    low = sizes[right - 1]
    high = sizes[right]
    slope = (table[high] - table[low]) / (high - low)
    if size > high:
        return table[high] + max(slope, 0.0) * (size - high)
    return table[low] + slope * (size - low)


class Expected(NamedTuple):
    """Expectations for a tree of ``shape``: ``speedup`` and tokens a round ``tau``."""

    shape: TreeShape
    speedup: float
    tau: float


@dataclass(frozen=True)
class Plan:
    """The ``best`` tree (None: plain decoding) of the ``candidates``."""

    best: Expected | None
    candidates: tuple[Expected, ...]
    costs: Costs


def plan(
    costs: Costs,
    worth: Acceptance | Callable[[TreeShape], float],
    candidates: Sequence[TreeShape],
    margin: float = 0.05,
) -> Plan:
    """The candidate that should be fastest, or plain decoding if none exceeds 1 + ``margin``.

    Of the candidates within ``NOISE`` of the largest expected speedup, any of which might win a new
    measurement, it takes the one with the fewest nodes; on ties the earlier. ``worth`` is an
    acceptance table [K] or [D, K] (:mod:`specmm.shape.sequoia`), or a function from a tree to its
    tokens a round.
    """
    if margin < 0:
        raise ValueError(f"margin must be at least 0, got {margin}")
    forecasts = tuple(_expected(costs, worth, shape) for shape in candidates)
    most = max((forecast.speedup for forecast in forecasts), default=0.0)
    near = [forecast for forecast in forecasts if forecast.speedup * NOISE >= most]
    best = min(near, key=lambda forecast: forecast.shape.size, default=None)
    gains = best is not None and best.speedup > 1 + margin
    return Plan(best if gains else None, forecasts, costs)


def _expected(
    costs: Costs, worth: Acceptance | Callable[[TreeShape], float], shape: TreeShape
) -> Expected:
    tau = worth(shape) if callable(worth) else float(expected_tau(shape, worth).mean())
    return Expected(shape, tau * costs.step / costs.round(shape.size, shape.depth), tau)


def measured(record: Record) -> Costs | None:
    """The costs from whole runs in a ``record``; None unless trees and plain decoding were run."""
    draft: dict[int, float] = {}
    verify: dict[int, float] = {}
    hosts = []
    for one in record.candidates:
        stats = [sample.stats for sample in record.samples.get(one.method, ()) if sample.stats]
        if not (one.nodes and stats):
            continue
        seconds = total(stats)
        rounds = max(seconds.batch_rounds, 1)
        draft[one.levels] = seconds.draft_seconds / rounds
        verify[one.nodes] = seconds.verify_seconds / rounds
        hosts.append((seconds.seconds - seconds.draft_seconds - seconds.verify_seconds) / rounds)
    if not hosts or PLAIN.method not in record.samples:
        return None
    return Costs(draft, verify, record.each(PLAIN.method), max(statistics.median(hosts), 0.0))
