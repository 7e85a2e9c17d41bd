"""Whether to speculate, and with which tree: from seconds and acceptance measured on this machine.

The speedup of a round over plain decoding is S = tau * step / (draft + verify + host): tau tokens
for the seconds of drafting the levels, of one target forward over N nodes, and of the host. A tree
is taken only if S exceeds a margin, so that speculation is never slower than the baseline beyond
noise. Nothing here knows a model.

Shape letters: B batch, D levels, K ranks.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmm.decode import decide
from specmm.drafter import Drafter, Feedback, committed
from specmm.hardware import attention_of_any_length
from specmm.randomness import Uniforms, UniformSource, categorical
from specmm.shape.sequoia import Acceptance, expected_tau
from specmm.stats import Clock
from specmm.target import Target
from specmm.tree import DraftTree, TreeShape
from specmm.verify.rule import Rule
from specmm.watching import tell

NOISE = 1.03  # speedups nearer to one another than this factor count as equal
# Children by level of a spine wide enough to measure whatever a tree may hold.
WIDEST = (6, 5, 4, 4, 3, 3, 2, 2, 1, 1)
Table = Mapping[int, float] | Callable[[int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine.

    ``draft`` by levels drafted (the tree's depth), ``verify`` by nodes scored in one target forward
    (root included), ``step`` one step of plain decoding, ``host`` everything else in a round. A
    table is interpolated between its sizes and continued along its last two. ``rounds`` are whole
    ones by method, of methods without a tree to choose.
    """

    draft: Table
    verify: Table
    step: float
    host: float = 0.0
    rounds: Mapping[Any, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step <= 0:
            raise ValueError(f"step must be positive seconds, got {self.step}")
        if self.host < 0:
            raise ValueError(f"host must be at least 0 seconds, got {self.host}")

    def round(self, nodes: int, depth: int) -> float:
        """Seconds of one round that drafts ``depth`` levels and verifies ``nodes`` nodes."""
        return lookup(self.draft, depth) + lookup(self.verify, nodes) + self.host


def lookup(table: Table, size: int) -> float:
    """Seconds at ``size``: linear between the sizes measured and past them, constant below."""
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


class Measured(NamedTuple):
    """What watchers are told while a plan is made: ``done`` of at most ``total`` measurements."""

    done: int
    total: int


class Candidate(NamedTuple):
    """What a plan chose from: ``choice``, a tree or a method, with its speed over plain decoding
    and tokens a round (None: not known), expected or measured; of a relaxed method the total
    variation a token. ``left`` says why it was not measured to the end, if so.
    """

    choice: Any
    speedup: float
    tau: float | None = None
    tv: float = 0.0
    left: str = ""


@dataclass(frozen=True)
class Plan:
    """What to run: ``shape`` (None for plain decoding), the speedup expected, and why, in words.

    ``costs`` are the seconds that the decision rests on, None if nothing was measured.
    ``draft_free`` is a method without a tree to run instead of plain decoding, if any.
    ``candidates`` are all that it was chosen from.
    """

    shape: TreeShape | None
    expected_tau: float
    expected_speedup: float
    reason: str
    costs: Costs | None = None
    draft_free: Any = None
    candidates: tuple[Candidate, ...] = ()


def plan(
    costs: Costs,
    rank_acceptance: Acceptance | Callable[[TreeShape], float],
    candidates: Sequence[TreeShape],
    margin: float = 0.05,
) -> Plan:
    """The candidate that should be fastest, or plain decoding if none exceeds 1 + ``margin``.

    Of those within ``NOISE`` of the largest expected speedup it is the one with the fewest nodes:
    measured again, any of them might come first. Of equals it is the earlier. ``rank_acceptance``
    [K] or [D, K] is that of :mod:`specmm.shape.sequoia`, or gives the tokens a round of a tree.
    """
    if margin < 0:
        raise ValueError(f"margin must be at least 0, got {margin}")
    made = [_expected(costs, rank_acceptance, shape) for shape in candidates]
    if not made:
        return Plan(None, 1.0, 1.0, "plain decoding: no candidate tree", costs)
    most = max(one.expected_speedup for one in made)
    near = [i for i, one in enumerate(made) if one.expected_speedup * NOISE >= most]
    best = made[min(near, key=lambda i: candidates[i].size)]
    all_of = tuple(Candidate(p.shape, p.expected_speedup, p.expected_tau) for p in made)
    if best.expected_speedup <= 1 + margin:
        reason = f"plain decoding: best candidate ({best.reason}) does not exceed {1 + margin:.2f}x"
        return Plan(None, 1.0, 1.0, reason, costs, candidates=all_of)
    return replace(best, candidates=all_of)


def _expected(
    costs: Costs, worth: Acceptance | Callable[[TreeShape], float], shape: TreeShape
) -> Plan:
    tau = worth(shape) if callable(worth) else float(expected_tau(shape, worth).mean())
    speedup = tau * costs.step / costs.round(shape.size, shape.depth)
    size = f"{shape.size} nodes, depth {shape.depth}"
    reason = f"{size}: tau {tau:.2f}, {speedup:.2f}x plain decoding expected"
    return Plan(shape, tau, speedup, reason, costs)


class Rival(NamedTuple):
    """A method without a tree to choose: its ``drafter``, and the tokens a round that it was
    measured to commit.
    """

    method: Any
    drafter: Drafter
    tau: float


def against(made: Plan, rivals: Sequence[Rival]) -> Plan:
    """``made``, or one of the ``rivals`` if that should be faster by more than noise."""
    for rival in rivals:
        assert made.costs is not None, "of their rounds, too"
        speedup = rival.tau * made.costs.step / made.costs.rounds[rival.method]
        reason = f"{rival.method.name}: tau {rival.tau:.2f}, {speedup:.2f}x plain decoding expected"
        made = _faster(made, Plan(None, rival.tau, speedup, reason, made.costs, rival.method))
    return made


def _faster(made: Plan, other: Plan) -> Plan:
    """The ``other`` plan in place of ``made`` if it should be faster by more than noise; the
    candidates of both.
    """
    one = Candidate(other.draft_free, other.expected_speedup, other.expected_tau)
    chosen = other if other.expected_speedup > NOISE * made.expected_speedup else made
    return replace(chosen, candidates=(*made.candidates, one))


class RoundSeconds(NamedTuple):
    """Median seconds of drafting, of scoring, and of deciding and committing."""

    draft: float
    verify: float
    host: float


@dataclass
class Passes:
    """Costs measured in several passes, each a plain step and the rounds of all shapes.

    A machine's speed drifts, and every forecast rests on the plain step. So the seconds of a round
    are divided by those of the plain step of the same pass, and medians of these ratios count.
    """

    steps: list[float] = field(default_factory=list)
    drafts: dict[int, list[float]] = field(default_factory=dict)
    verifies: dict[int, list[float]] = field(default_factory=dict)
    hosts: list[float] = field(default_factory=list)
    others: dict[Any, list[float]] = field(default_factory=dict)

    def add(
        self,
        step: float,
        rounds: Sequence[tuple[TreeShape, tuple[float, float, float]]],
        others: Mapping[Any, float] | None = None,
    ) -> None:
        """A pass: seconds of a plain step, (draft, verify, host) of a round by shape, and those of
        a whole round of ``others``.
        """
        self.steps.append(step)
        for shape, (draft, verify, host) in rounds:
            self.drafts.setdefault(shape.depth, []).append(draft / step)
            self.verifies.setdefault(shape.size, []).append(verify / step)
            self.hosts.append(host / step)
        for method, seconds in (others or {}).items():
            self.others.setdefault(method, []).append(seconds / step)

    def costs(self) -> Costs:
        """The seconds by all passes together."""
        step = statistics.median(self.steps)
        draft = {depth: step * statistics.median(found) for depth, found in self.drafts.items()}
        verify = {size: step * statistics.median(found) for size, found in self.verifies.items()}
        host = step * statistics.median(self.hosts) if self.hosts else 0.0
        rounds = {method: step * statistics.median(found) for method, found in self.others.items()}
        return Costs(draft, verify, step, host, rounds)


def until_stable(
    one_pass: Callable[[Passes], None],
    choose: Callable[[Costs], Plan],
    least: int = 3,
    most: int = 9,
) -> Plan:
    """Measure until three passes in a row lead to the same choice, or ``most`` have been made.

    If the choice never settles, it is plain decoding: candidates and plain steps are too close to
    tell apart.
    """
    measured = Passes()
    chosen: list[Plan] = []
    for done in range(most):
        one_pass(measured)
        tell(Measured(done + 1, most))
        made = choose(measured.costs())
        chosen.append(made)
        if len(chosen) >= least and all(_alike(one, made) for one in chosen[-3:]):
            return made
    if any(one.shape is None and one.draft_free is None for one in chosen[-3:]):
        reason = "plain decoding: which of the two was faster changed from pass to pass"
        return Plan(None, 1.0, 1.0, reason, made.costs, candidates=made.candidates)
    return made


def _alike(one: Plan, other: Plan) -> bool:
    """Whether both run the same."""
    return one.shape is other.shape and one.draft_free == other.draft_free


def measure(fn: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median seconds of ``fn()`` over ``repeats`` calls, after ``warmup`` calls that do not count.

    A GPU in use is waited for.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}"
        )
    on_gpu: bool = torch.cuda.is_initialized()
    for _ in range(warmup):
        fn()
    seconds = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


@torch.inference_mode()
@attention_of_any_length()
def time_step(target: Target, prompt: Any, uniforms: Uniforms, repeats: int = 14) -> float:
    """Median seconds of a plain step after ``prompt``, the draw included; takes ``repeats`` + 3."""
    token = categorical(target.prefill(prompt, 0).probs[:, -1], uniforms.draw(1)[:, 0])

    def step() -> None:
        nonlocal token
        token = categorical(target.step(token).probs[:, 0], uniforms.draw(1)[:, 0])

    return measure(step, repeats=repeats, warmup=3)


@torch.inference_mode()
@attention_of_any_length()
def time_round(
    target: Target, drafter: Drafter, rule: Rule, prompt: Any, uniforms: Uniforms, repeats: int = 7
) -> RoundSeconds:
    """Seconds of one round after ``prompt``; needs room for ``repeats`` + 2 tokens of answer."""
    output = target.prefill(prompt, drafter.max_nodes)
    feedback = Feedback(output, categorical(output.probs[:, -1], uniforms.draw(1)[:, 0]))
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, uniforms)
    output = target.score(tree)
    result = decide(rule, tree, output.probs, uniforms)
    # every repetition commits one token, so that none overflows
    result.kept = torch.ones_like(result.kept)
    feedback = Feedback(output, result.next_token, tree, result, committed(tree, result))

    def decide_and_commit() -> None:
        decide(rule, tree, output.probs, uniforms)
        target.commit(result)

    return RoundSeconds(
        draft=measure(lambda: drafter.propose(feedback, uniforms), repeats, warmup=2),
        verify=measure(lambda: target.score(tree), repeats, warmup=2),
        host=measure(decide_and_commit, repeats, warmup=2),
    )


def planned(
    target: Target,
    drafter_of: Callable[[TreeShape], Drafter],
    shapes: Sequence[TreeShape],
    rule: Rule,
    prompt: Any,
    uniforms: Uniforms,
    acceptance: Acceptance,
    repeats: int = 4,
    rivals: Sequence[Rival] = (),
) -> Plan:
    """The plan of ``shapes`` by ``acceptance``, or of one of the ``rivals``, which go by ``rule``,
    too, on seconds measured now (:func:`until_stable`).

    In each pass the plain step is timed before and after the rounds of all.
    """

    def seconds(drafter: Drafter) -> RoundSeconds:
        return time_round(target, drafter, rule, prompt, uniforms, repeats)

    def one_pass(measured: Passes) -> None:
        before = time_step(target, prompt, uniforms, repeats)
        rounds = [(shape, seconds(drafter_of(shape))) for shape in shapes]
        others = {rival.method: sum(seconds(rival.drafter)) for rival in rivals}
        after = time_step(target, prompt, uniforms, repeats)
        measured.add((before + after) / 2, rounds, others)

    return until_stable(one_pass, lambda costs: against(plan(costs, acceptance, shapes), rivals))


class AcceptanceCounter:
    """Wraps a drafter and counts, by level and rank, which drafts of a spine ``shape`` are kept."""

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        self.drafter = drafter
        self.shape = shape
        self.max_nodes = drafter.max_nodes
        self.max_depth = drafter.max_depth
        self.kept = torch.zeros(shape.depth, shape.width)
        self.visits = torch.zeros(shape.depth, 1)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        self.drafter.begin(feedback, clock)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Count the last round, then let the drafter draft."""
        if feedback.result is not None:
            self._count(feedback.result.path, feedback.result.kept)
        return self.drafter.propose(feedback, uniforms)

    def _count(self, path: Tensor, kept: Tensor) -> None:
        ranks = self.shape.ranks[0]
        for depth in range(1, path.shape[1]):
            before = path[:, depth - 1]
            node = path[:, depth]
            on_spine = ranks[before.clamp(min=0)] == 0  # the other nodes have no children
            visited = (depth <= kept) & on_spine
            taken = ranks[node[visited & (depth < kept)]]
            self.visits[depth - 1] += visited.sum()
            self.kept[depth - 1] += torch.bincount(taken, minlength=self.kept.shape[1])

    def table(self) -> tuple[tuple[float, ...], ...]:
        """How often each rank was the one kept [D, K], of the times that its parent was kept."""
        shares = self.kept / self.visits.clamp(min=1)
        shares = (shares * 1e4).floor() / 1e4  # rounded down: a row sums to at most 1
        return tuple(tuple(round(v, 4) for v in row) for row in shares.tolist())
