"""Whether to speculate, and with which tree: from seconds measured on this machine, falling back to
plain decoding.

The speedup of a round over plain decoding is S = tau * step / (draft + verify + host): tau tokens
for the drafter's levels, one forward of the target over N nodes and the host's share. A tree is
taken only if S clears a margin, so that turning speculation on is never slower than the baseline
beyond noise. Nothing here knows a model.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specmm.shape.sequoia import Acceptance, expected_tau
from specmm.tree import TreeShape

NOISE = 1.03  # speedups nearer to one another than this are taken for equal
UNSETTLED = "its seconds and those of rounds changed places from pass to pass"
Table = Mapping[int, float] | Callable[[int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine.

    ``draft`` by levels drafted (the tree's depth), ``verify`` by nodes scored in one target forward
    (root included), ``step`` one step of plain decoding, ``host`` what else a round of speculation
    takes. A table is interpolated between its sizes and continued along its last two.
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
    """What to run: ``shape`` (None for plain decoding), what it should bring, and why in words.

    ``costs`` are the measured seconds that it was decided on, None where nothing was measured.
    ``draft_free`` is a method without a tree that is to run in place of plain decoding, None for
    none.
    """

    shape: TreeShape | None
    expected_tau: float
    expected_speedup: float
    reason: str
    costs: Costs | None = None
    draft_free: Any = None


def plan(
    costs: Costs, rank_acceptance: Acceptance, candidates: Sequence[TreeShape], margin: float = 0.05
) -> Plan:
    """The candidate that should be fastest, or plain decoding if none is above 1 + ``margin``.

    Of those within ``NOISE`` of the largest expected speedup the one with the fewest nodes:
    measured again, either might come first. ``rank_acceptance`` [K] or [D, K] is positional
    (``specmm.shape.expected``). Equal ones go to the earlier.
    """
    if margin < 0:
        raise ValueError(f"margin must be at least 0, got {margin}")
    made = [_expected(costs, rank_acceptance, shape) for shape in candidates]
    if not made:
        return Plan(None, 1.0, 1.0, "plain decoding: no candidate tree", costs)
    most = max(one.expected_speedup for one in made)
    near = [i for i, one in enumerate(made) if one.expected_speedup * NOISE >= most]
    best = made[min(near, key=lambda i: candidates[i].size)]
    if best.expected_speedup <= 1 + margin:
        reason = f"plain decoding: best candidate ({best.reason}) does not exceed {1 + margin:.2f}x"
        return Plan(None, 1.0, 1.0, reason, costs)
    return best


def _expected(costs: Costs, rank_acceptance: Acceptance, shape: TreeShape) -> Plan:
    """What a round of ``shape`` should bring."""
    tau = float(expected_tau(shape, rank_acceptance).mean())
    speedup = tau * costs.step / costs.round(shape.size, shape.depth)
    text = f"{shape.size} nodes, depth {shape.depth}: tau {tau:.2f}, {speedup:.2f}x plain decoding expected"
    return Plan(shape, tau, speedup, text, costs)


@dataclass
class Passes:
    """Costs measured again and again, plain step and rounds in turn, until the choice that follows
    from them is stable.

    A machine's speed drifts, and the plain step's time is in every forecast: so seconds of rounds
    are taken over the plain step's of the same pass, and medians of these ratios count.
    """

    steps: list[float]
    drafts: dict[int, list[float]]
    verifies: dict[int, list[float]]
    hosts: list[float]

    @classmethod
    def none(cls) -> Passes:
        """Before the first pass."""
        return cls([], {}, {}, [])

    def add(
        self, step: float, rounds: Sequence[tuple[TreeShape, tuple[float, float, float]]]
    ) -> None:
        """A pass: seconds of a plain step, and (draft, verify, host) of a round by shape."""
        self.steps.append(step)
        for shape, (draft, verify, host) in rounds:
            self.drafts.setdefault(shape.depth, []).append(draft / step)
            self.verifies.setdefault(shape.size, []).append(verify / step)
            self.hosts.append(host / step)

    def costs(self) -> Costs:
        """The seconds that all passes together say."""
        step, median = statistics.median(self.steps), statistics.median
        draft, verify = (
            {k: step * median(v) for k, v in t.items()} for t in (self.drafts, self.verifies)
        )
        return Costs(draft, verify, step, step * median(self.hosts) if self.hosts else 0.0)


def until_stable(
    one_pass: Callable[[Passes], None],
    decide: Callable[[Costs], Plan],
    least: int = 3,
    most: int = 9,
) -> Plan:
    """Measure, pass by pass, until three passes in a row lead to the same shape, or ``most`` have
    been made.

    A choice that never settles falls to plain decoding: candidates and plain steps are too near to
    tell apart.
    """
    measured, chosen = Passes.none(), list[TreeShape | None]()
    for _ in range(most):
        one_pass(measured)
        made = decide(measured.costs())
        chosen.append(made.shape)
        if len(chosen) >= least and all(shape is made.shape for shape in chosen[-3:]):
            return made
    if None in chosen[-3:]:
        return replace(
            made,
            shape=None,
            expected_tau=1.0,
            expected_speedup=1.0,
            reason=f"plain decoding: {UNSETTLED}",
        )
    return made


def lookup(table: Table, size: int) -> float:
    """Seconds at ``size``: linear between the sizes measured, constant below them, on along the
    last slope above.
    """
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
    """Median seconds of ``fn()`` over ``repeats`` calls after ``warmup`` uncounted ones, waiting
    for a GPU in use.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}"
        )
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
