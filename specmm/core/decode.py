"""The one loop: draft a tree, score it in one forward, keep what the rule accepts.

Rows accept different numbers of tokens and do not wait for each other: each ends at its length, or
earlier by a :class:`Stop`.

Shape letters: B batch, T tokens wanted, N nodes, D deepest level, V vocabulary, E end tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.choose.threads import look_again
from specmm.core.continuous_batching import Queue, begin_anew
from specmm.core.drafter import Drafter, Feedback, NoDrafts, check_rule, committed
from specmm.core.late import Late
from specmm.core.processors import check_finite, not_finite
from specmm.core.randomness import RowNumbers, Streams, Uniforms, UniformSource, categorical
from specmm.core.state import with_one, without
from specmm.core.stats import Clock, Stats
from specmm.core.target import Target, TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.core.watching import tell
from specmm.kernels.acceptance import decide_fused
from specmm.kernels.backend import backend
from specmm.loading.hardware import attention_of_any_length
from specmm.verify import Recursive
from specmm.verify.claims import GivenTrees, proved
from specmm.verify.matching import Matching
from specmm.verify.rule import Rule, VerifyResult, draw_uniforms, sample_result

# A row's tokens have room for a power of two of these, so that texts of many lengths share a
# compiled program.
ROOM = 256


class Stop(Protocol):
    """Decides where rows end. Called once a round, on the device; should not wait for a value."""

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Counts [B] to commit, and whether rows are done [B] bool.

        ``tokens`` [B, T] holds each row's tokens; this round's are from ``before`` [B] to ``after``
        [B].
        """


class EndTokens:
    """Ends a row after the first token in ``ids``, which is kept."""

    state: ClassVar[tuple[str, ...]] = ("ids",)

    def __init__(self, ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.ids = torch.tensor(list(ids), dtype=torch.int64, device=device)  # [E]

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        column = torch.arange(tokens.shape[1], device=tokens.device)
        fresh = (column >= before[:, None]) & (column < after[:, None])
        ends = torch.isin(tokens, self.ids) & fresh
        done = ends.any(1)
        return torch.where(done, ends.int().argmax(1) + 1, after), done


def all_of(*stops: Stop) -> Stop:
    """All ``stops`` as one: a row ends at the earliest end."""

    def first(tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        done = torch.zeros_like(after, dtype=torch.bool)
        for stop in stops:
            after, ended = stop(tokens, before, after)
            done = done | ended
        return after, done

    return first


@dataclass
class Progress:
    """The state after a round: the first ``counts`` [B] of each row of ``tokens`` are committed.

    ``tokens`` is [B, T or more]. A row ends at ``limits`` [B] tokens, which ``stop`` may lower. All
    are written in place. In the last round the rule accepted ``gained[1]`` [B] tokens, of which the
    first ``gained[0]`` [B] were committed. ``name`` is the target's. ``ahead``: the host launches
    the next round before it has read the last one's results.
    """

    tokens: Tensor
    counts: Tensor
    limits: Tensor
    stats: Stats
    excess: Tensor  # a relaxed rule's, summed over rounds and rows
    measured: Tensor  # tokens that it is of
    stop: Stop | None = None
    length: int = 0  # T
    gained: tuple[Tensor, Tensor] | None = None
    name: str = ""
    ahead: bool = False
    rounds: int = 0  # of the batch so far
    # of the last round and the one before: the least and most tokens that a row lacks, and checks
    read: tuple[Late | None, Late | None] = (None, None)
    since_start: int = 0  # rounds since a sample last began in a row
    trees: GivenTrees = field(default_factory=GivenTrees)  # of third-party exact rules
    state: ClassVar[tuple[str, ...]] = ("tokens", "counts", "limits", "stop")

    def restart(self, row: int, token: Tensor) -> None:
        """Begin a new sample in ``row`` with ``token`` [1], which may end it."""
        before = self.counts.clone()
        before[row] = 0
        self.tokens[row, 0] = token[0]
        self.counts[row] = 1
        self.limits[row] = self.length
        self.since_start = 0
        if self.stop is not None:
            self._end(*self.stop(self.tokens, before, self.counts))

    def widen(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in every row."""
        if tokens > self.tokens.shape[1]:
            self.tokens = F.pad(self.tokens, (0, room(tokens) - self.tokens.shape[1]))

    def join(self) -> None:
        """Add a row at the end, which is then restarted."""
        for name in ("tokens", "counts", "limits"):
            setattr(self, name, with_one(getattr(self, name)))

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        for name in ("tokens", "counts", "limits"):
            setattr(self, name, without(getattr(self, name), row))

    def _end(self, counts: Tensor, done: Tensor) -> None:
        """Commit ``counts`` [B] tokens; rows that are ``done`` [B] end there."""
        self.limits.copy_(torch.where(done, counts, self.limits))
        self.counts.copy_(counts)

    def row(self, row: int) -> Tensor:
        """The tokens of ``row`` so far."""
        return self.tokens[row, : int(self.counts[row])]

    def ended(self) -> list[int]:
        """The indices of rows that have all their tokens."""
        rows: list[int] = (self.counts >= self.limits).nonzero()[:, 0].tolist()
        return rows

    def take(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Commit the first ``kept`` [B] of ``tokens`` [B, D + 1], but no more than a row needs.

        Returns the number of tokens that each row took [B].
        """
        where = self.counts[:, None] + torch.arange(tokens.shape[1], device=kept.device)
        self.tokens.scatter_(1, where, tokens)
        after = torch.minimum(self.counts + kept, self.limits)
        done = None
        if self.stop is not None:
            after, done = self.stop(self.tokens, self.counts, after)
        committed_counts = after - self.counts
        if done is None:
            self.counts.copy_(after)
        else:
            self._end(after, done)
        return committed_counts

    def unfinished(self, sure: bool = False, most: int = 1) -> bool:
        """Whether a row lacks tokens. Without a stop, nothing is read if the caller is ``sure``.

        When ``ahead``, the answer is from one round ago, if a row then lacked more than the
        ``most`` tokens of a round. With a stop, which may end rows at any time, one extra round may
        run.
        """
        if self.ahead and self.since_start > 1:
            latest, before = self.read
            if before is not None and latest is not None:
                left = before.read()[1]
                return left > 0 if self.stop is not None else left > most or latest.read()[1] > 0
        return (sure and self.stop is None) or bool((self.counts < self.limits).any())

    def end_round(self, checks: Tensor) -> None:
        """Count a round with its ``checks``. If ``ahead``, start copying the numbers of missing
        tokens to the host.

        Raises ``ValueError`` for non-finite numbers: of this round or, if ``ahead``, of the
        previous one.
        """
        self.rounds += 1
        self.since_start += 1
        if not self.ahead:
            self._check(self.rounds, checks.tolist())
            return
        lack = torch.stack((self.limits - self.counts).aminmax())
        latest = self.read[0]
        self.read = (Late(torch.cat((lack.to(checks.dtype), checks))), latest)
        if latest is not None:
            self._check(self.rounds - 1, latest.read()[2:])

    def end(self) -> None:
        """Raise ``ValueError`` if a number of the last round was not finite."""
        if self.read[0] is not None:
            self._check(self.rounds, self.read[0].read()[2:])

    def _check(self, round_number: int, checks: Sequence[float]) -> None:
        if not all(map(math.isfinite, checks)):
            of_target = len(checks) > 1 and not all(map(math.isfinite, checks[:2]))
            raise not_finite(f"{self.name if of_target else 'the drafter'} in round {round_number}")

    @property
    def may_have_ended(self) -> bool:
        """Whether a row has all its tokens or, if ``ahead``, had them before this round."""
        before = self.read[1]
        return not self.ahead or self.since_start < 2 or before is None or before.read()[0] <= 0

    def observe(self, result: VerifyResult, histogram: Tensor) -> None:
        """Count a round; ``histogram`` [B, D + 2] counts rounds by tokens committed."""
        kept = result.kept
        histogram.scatter_add_(1, kept[:, None], torch.ones_like(kept)[:, None])
        if result.excess is not None:
            counted = torch.arange(result.excess.shape[1], device=kept.device) < kept[:, None]
            self.excess += (result.excess * counted).sum()
            self.measured += kept.sum()


class DecodedRound(NamedTuple):
    """Event for watchers after a round: the drafted ``tree``, the target's distributions ``probs``
    [B, N, V] after its nodes, the ``rule`` and its ``result``.
    """

    tree: DraftTree
    probs: Tensor
    rule: Rule
    result: VerifyResult


Parts: TypeAlias = tuple[Any, Any, Rule]
"""Target, drafter, rule."""
Play: TypeAlias = Callable[[Parts, Feedback, Progress, Streams, Clock], Feedback]
"""Plays a round as :func:`one_round` does."""


def without_drafts() -> tuple[Drafter, Rule]:
    """Drafter and rule for plain decoding as rounds without drafts."""
    return NoDrafts(), Recursive()


def decide(
    rule: Rule, tree: DraftTree, p: Tensor, uniforms: UniformSource, *, measure: bool = False
) -> VerifyResult:
    """The decision of ``rule`` about ``tree`` under the target's distributions ``p`` [B, N, V].

    On a GPU, rules that ``specmm.kernels.acceptance`` knows run as one kernel, unless the excess is
    measured.
    """
    if isinstance(rule, Matching):
        return rule.result(tree, p, uniforms)
    if not measure and backend(p.device) == "triton":
        result = decide_fused(rule, tree, p, uniforms)
        if result is not None:
            return result
    decisions = rule.decisions(tree, p, measure=measure)
    return sample_result(decisions, tree.shape, draw_uniforms(tree.shape, uniforms))


def one_round(
    parts: Parts, feedback: Feedback, progress: Progress, uniforms: UniformSource, clock: Clock
) -> Feedback:
    """Run a :func:`verified_round` and commit its accepted nodes to the target's cache."""
    done = verified_round(parts, feedback, progress, uniforms, clock)
    parts[0].commit(done.drafted[1])
    return done


def verified_round(
    parts: Parts, feedback: Feedback, progress: Progress, uniforms: UniformSource, clock: Clock
) -> Feedback:
    """Draft after ``feedback``, score, and commit the tokens that the rule accepts; returns the
    next feedback.

    The host reads no values, so a program can run it. A relaxed rule's excess is always measured.
    """
    target, drafter, rule = parts
    tree = drafter.propose(feedback, uniforms)
    with clock("verify"):
        output = target.score(tree)
    result = decide(rule, tree, output.probs, uniforms, measure=not rule.exact)
    tokens = committed(tree, result)
    accepted = result.kept
    result.kept = progress.take(tokens, accepted)  # a finished row keeps nothing
    checks = [] if output.extremes is None else [output.extremes.float()]
    if tree.probs is not None:
        checks.append(tree.probs[:, 1:].sum(dtype=torch.float32)[None])
    ends = torch.cat(checks) if checks else output.probs.new_zeros(0)
    return Feedback(output, result.next_token, tree, result, tokens, None, accepted, ends)


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    prompt: Any,
    length: int,
    uniforms: Uniforms,
    sync: bool = False,
    stop: Stop | None = None,
    queue: Queue | None = None,
    play: Play = one_round,
) -> Iterator[Progress]:
    """Generate ``length`` tokens, or up to ``stop``, for every row of ``prompt``.

    Yields after each round, and once more with the run's stats. A finished row commits nothing
    more, unless a sample of the ``queue`` takes it over (see
    :mod:`specmm.core.continuous_batching`). Raises ``ValueError`` when the target's logits or the
    drafter's distributions are not finite (before the round's tokens are yielded, or one round
    later if ``play`` is ``ahead``), and for a rule that does not fit the drafter.
    """
    check_rule(drafter, rule)
    start = time.perf_counter()
    clock = Clock(sync)
    numbers: Streams = uniforms
    if isinstance(rule, Matching):
        numbers = RowNumbers.of(uniforms, length + drafter.max_depth + 1)
    with attention_of_any_length():
        with clock("verify"):
            output = target.prefill(prompt, drafter.max_nodes)
        check_output(output, target.name)
        token = first_token(rule, output.probs[:, -1:], numbers.draw(1)[:, 0])
        feedback = Feedback(output, token)
        drafter.begin(feedback, clock)
    progress = begun(token, length, drafter.max_depth + 1, stop)
    progress.name = target.name
    if isinstance(numbers, RowNumbers):
        numbers.counts = progress.counts
    histogram = token.new_zeros(len(token), drafter.max_depth + 2)
    depths: list[int] = []
    parts = (target, drafter, rule)
    most = drafter.max_depth + 1  # tokens of a round
    unproved = rule.exact and not proved(rule)
    progress.ahead = getattr(play, "ahead", False)
    while progress.unfinished(len(depths) * most < length - 1, most) or (queue and queue.left):
        with attention_of_any_length():
            feedback = play(parts, feedback, progress, numbers, clock)
        tree, result = feedback.drafted
        if unproved:
            progress.trees.add(tree)
        progress.observe(result, histogram)
        assert feedback.accepted is not None
        progress.gained = result.kept, feedback.accepted
        assert feedback.checks is not None, "of a round"
        with clock("verify"):
            progress.end_round(feedback.checks)
        tell(DecodedRound(tree, feedback.output.probs, rule, result))
        depths.append(tree.levels)
        look_again()
        if queue is not None and progress.may_have_ended:
            _fill_rows(queue, progress, histogram, feedback, parts, numbers, clock)
        yield progress
    with clock("verify"):
        progress.end()
    if queue is not None:
        for row in range(len(token)):
            queue.collect(row, progress.row(row), histogram[row])
        histogram = torch.stack(queue.kept)
    progress.stats = _stats(histogram, len(depths), time.perf_counter() - start, clock)
    progress.stats.depths = depths
    yield progress


@torch.inference_mode()
def decode_plain(
    target: Target,
    prompt: Any,
    length: int,
    uniforms: Uniforms,
    sync: bool = False,
    stop: Stop | None = None,
) -> Iterator[Progress]:
    """As :func:`decode`, one token at a time on the target's fastest path: the baseline."""
    start = time.perf_counter()
    clock = Clock(sync)
    with attention_of_any_length(), clock("verify"):
        output = target.prefill(prompt, 0)
        check_output(output, target.name)
    token = categorical(output.probs[:, -1], uniforms.draw(1)[:, 0])
    progress = begun(token, length, 0, stop)
    ones = torch.ones_like(token)
    steps = 0
    while progress.unfinished(sure=True) and steps < length - 1:
        with attention_of_any_length(), clock("verify"):
            output = target.step(token)
            check_output(output, target.name, steps + 1)
        token = categorical(output.probs[:, 0], uniforms.draw(1)[:, 0])
        progress.gained = progress.take(token[:, None], ones), ones
        steps += 1
        look_again()
        yield progress
    histogram = torch.stack([torch.zeros_like(ones), progress.counts - 1], dim=1)
    progress.stats = _stats(histogram, steps, time.perf_counter() - start, clock)
    yield progress


def _fill_rows(
    queue: Queue,
    progress: Progress,
    histogram: Tensor,
    feedback: Feedback,
    parts: Parts,
    uniforms: Streams,
    clock: Clock,
) -> None:
    """Let samples of the ``queue`` take over the rows that are finished."""
    target, drafter, rule = parts
    # in a loop, for a sample may end with its first token
    while queue.left and (ended := progress.ended()):
        for row in ended[: queue.left]:
            queue.collect(row, progress.row(row), histogram[row])
            histogram[row] = 0
            output, numbers = queue.start_row(row, target, drafter, uniforms, clock)
            check_output(output, target.name)
            token = first_token(rule, output.probs[:, -1:], numbers)
            begin_anew(feedback, row, output, token)
            progress.restart(row, token)


def first_token(rule: Rule, probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token [B] that ``rule`` emits, without drafts, after the prefill's ``probs`` [B, 1, V].

    ``uniforms`` is [B]. For most rules this samples ``probs``. Rules of greedy decoding, which see
    the softmax of the logits, take the mode.
    """
    root = probs.new_zeros(len(probs), 1, dtype=torch.int64)
    root_tree = DraftTree(root, TreeShape.chain(0, probs.device), probs)
    return categorical(rule.decisions(root_tree, probs).next_probs[:, 0], uniforms)


def check_output(output: TargetOutput, name: str, round_number: int = 0) -> None:
    """Raise ``ValueError`` naming round and model if logits were not finite; waits for them."""
    if output.extremes is not None:
        check_finite(output.extremes, f"{name} in round {round_number}")


def room(tokens: int) -> int:
    """Slots for ``tokens``: ``ROOM`` doubled until they fit."""
    slots = ROOM
    while slots < tokens:
        slots *= 2
    return slots


def begun(token: Tensor, length: int, spare: int, stop: Stop | None = None) -> Progress:
    """Progress of rows of ``length`` tokens after ``token`` [B], with room for ``spare`` more."""
    with torch.inference_mode(False):  # as a cache's: a compiled round writes them
        tokens = token.new_zeros(len(token), room(length + spare) if spare else length)
        none, limits = token.new_zeros(len(token)), token.new_full((len(token),), length)
    excess = torch.zeros((), device=token.device)
    common = (Stats(), excess, excess.clone(), stop, length)
    progress = Progress(tokens, none, limits, *common)
    progress.take(token[:, None], torch.ones_like(token))
    return progress


def _stats(histogram: Tensor, rounds: int, seconds: float, clock: Clock) -> Stats:
    """A run's statistics, from each row's ``histogram`` of rounds by committed tokens."""
    accepted = histogram[:, 1:].sum(0).tolist()
    return Stats(
        tokens=len(histogram) + sum(n * (i + 1) for i, n in enumerate(accepted)),
        rounds=sum(accepted),
        batch_rounds=rounds,
        seconds=seconds,
        draft_seconds=clock.seconds["draft"],
        verify_seconds=clock.seconds["verify"],
        search_seconds=clock.seconds["search"],
        kept=accepted,
        prefilled=len(histogram),
        kept_by_row=histogram[:, 1:].tolist(),
    )
