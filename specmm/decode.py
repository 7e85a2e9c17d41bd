"""The one loop: draft a tree, score it in one forward, keep what the rule accepts.

Rows accept different numbers of tokens and none waits for another: each ends after its length, or
where a :class:`Stop` says.

Shape letters: B batch, T tokens wanted, N nodes, D deepest level, V vocabulary, E end tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from specmm.choose.threads import look_again
from specmm.continuous_batching import Queue, begin_anew
from specmm.drafter import Drafter, Feedback, NoDrafts, check_rule, committed
from specmm.hardware import attention_of_any_length
from specmm.kernels.acceptance import decide_fused
from specmm.kernels.backend import backend
from specmm.late import Late, LateChecks
from specmm.processors import check_finite
from specmm.randomness import Uniforms, UniformSource, categorical
from specmm.stats import Clock, Stats
from specmm.target import Target
from specmm.tree import DraftTree, TreeShape
from specmm.verify import Recursive
from specmm.verify.claims import GivenTrees, proved
from specmm.verify.rule import Rule, VerifyResult, draw_uniforms, sample_result
from specmm.watching import tell

# A row's tokens have room for a power of two of these, so that texts of many lengths share a
# compiled program.
ROOM = 256


class Stop(Protocol):
    """Says where rows end. Called once a round, on the device; it should not wait for a value."""

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Counts [B] to commit, and whether rows are done [B] bool.

        ``tokens`` [B, T] holds each row's tokens; those from ``before`` [B] to ``after`` [B] are
        this round's.
        """


class EndTokens:
    """Ends a row after the first of the end tokens ``ids``, which is kept."""

    def __init__(self, ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.ids = torch.tensor(list(ids), dtype=torch.int64, device=device)  # [E]

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        column = torch.arange(tokens.shape[1], device=tokens.device)
        fresh = (column >= before[:, None]) & (column < after[:, None])
        ends = torch.isin(tokens, self.ids) & fresh
        done = ends.any(1)
        return torch.where(done, ends.int().argmax(1) + 1, after), done


def all_of(*stops: Stop) -> Stop:
    """Ends a row where the first of ``stops`` does."""

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

    ``tokens`` is [B, T or more]. A row ends at its number of ``limits`` [B], which ``stop`` may
    lower. The first ``taken`` [B] of the last round's tokens were committed, of ``kept`` [B] that
    the rule kept. ``ahead``: the host tells the device rounds before the last one is known.
    """

    tokens: Tensor
    counts: Tensor
    limits: Tensor
    stats: Stats
    excess: Tensor  # of a relaxed rule, summed over rounds and rows
    measured: Tensor  # tokens that it is of
    stop: Stop | None = None
    length: int = 0  # T
    gained: tuple[Tensor, Tensor] | None = None  # (taken, kept)
    ahead: bool = False
    # the least and most tokens that a row lacks, after the last round and the one before
    lacking: tuple[Late | None, Late | None] = (None, None)
    trees: GivenTrees = field(default_factory=GivenTrees)  # of a rule that others call exact
    # by graphs: rounds read the limits
    aside: ClassVar[tuple[str, ...]] = ("trees", "length", "ahead", "lacking")

    def restart(self, row: int, token: Tensor) -> None:
        """A new sample begins in ``row`` with ``token`` [1], which may end it."""
        before = self.counts.clone()
        before[row] = 0
        self.tokens[row, 0] = token[0]
        self.counts[row] = 1
        self.limits[row] = self.length
        self.lacking = (None, None)
        if self.stop is not None:
            self.counts, done = self.stop(self.tokens, before, self.counts)
            self.limits = torch.where(done, self.counts, self.limits)

    def row(self, row: int) -> Tensor:
        """The tokens of ``row`` so far."""
        return self.tokens[row, : int(self.counts[row])]

    def ended(self) -> list[int]:
        """The rows that have all their tokens."""
        found: list[int] = (self.counts >= self.limits).nonzero()[:, 0].tolist()
        return found

    def take(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Commit the first ``kept`` [B] of ``tokens`` [B, D + 1], as far as a row needs them.

        Returns how many of them each row took [B].
        """
        where = self.counts[:, None] + torch.arange(tokens.shape[1], device=kept.device)
        self.tokens.scatter_(1, where, tokens)
        before = self.counts
        after = torch.minimum(self.counts + kept, self.limits)
        if self.stop is not None:
            after, done = self.stop(self.tokens, before, after)
            self.limits = torch.where(done, after, self.limits)
        self.counts = after
        taken = after - before
        self.gained = (taken, kept)
        return taken

    def unfinished(self, sure: bool = False, most: int = 1) -> bool:
        """Whether a row lacks tokens. Without a stop, nothing is read if the caller is ``sure``.

        When ``ahead``, what the round before left says so, if it was more than the ``most`` tokens
        of a round; where a stop may end rows at any time, one round too many is played.
        """
        if self.ahead:
            latest, before = self.lacking
            if before is not None and latest is not None:
                left = before.read()[1]
                return left > 0 if self.stop is not None else left > most or latest.read()[1] > 0
        return (sure and self.stop is None) or bool((self.counts < self.limits).any())

    def end_round(self) -> None:
        """Send what rows lack on its way to the host."""
        if self.ahead:
            lack = torch.stack((self.limits - self.counts).aminmax())
            self.lacking = (Late(lack), self.lacking[0])

    @property
    def may_have_ended(self) -> bool:
        """Whether a row has all its tokens; when ``ahead``, whether it had before this round."""
        before = self.lacking[1]
        return not self.ahead or before is None or before.read()[0] <= 0

    def observe(self, result: VerifyResult, histogram: Tensor) -> None:
        """Count a round; ``histogram`` [B, D + 2] counts rounds by tokens committed."""
        kept = result.kept
        histogram.scatter_add_(1, kept[:, None], torch.ones_like(kept)[:, None])
        if result.excess is not None:
            counted = torch.arange(result.excess.shape[1], device=kept.device) < kept[:, None]
            self.excess += (result.excess * counted).sum()
            self.measured += kept.sum()


class DecodedRound(NamedTuple):
    """What watchers are told of a round: the ``tree`` drafted, the target's distributions ``probs``
    [B, N, V] after its nodes, the ``rule`` and its ``result``.
    """

    tree: DraftTree
    probs: Tensor
    rule: Rule
    result: VerifyResult


Parts: TypeAlias = tuple[Any, Any, Rule]
"""Target, drafter, rule."""
Play: TypeAlias = Callable[[Parts, Feedback, Progress, Uniforms, Clock], Feedback]
"""Plays a round as :func:`one_round` does."""


def without_drafts() -> tuple[Drafter, Rule]:
    """Drafter and rule of plain decoding by rounds."""
    return NoDrafts(), Recursive()


def decide(
    rule: Rule, tree: DraftTree, p: Tensor, uniforms: UniformSource, *, measure: bool = False
) -> VerifyResult:
    """What ``rule`` keeps of ``tree`` under the target's distributions ``p`` [B, N, V].

    On a GPU, rules that ``specmm.kernels.acceptance`` knows are one kernel, unless the excess is to
    be measured.
    """
    if not measure and backend(p.device) == "triton":
        result = decide_fused(rule, tree, p, uniforms)
        if result is not None:
            return result
    decisions = rule.decisions(tree, p, measure=measure)
    return sample_result(decisions, tree.shape, draw_uniforms(tree.shape, uniforms))


def one_round(
    parts: Parts, feedback: Feedback, progress: Progress, uniforms: UniformSource, clock: Clock
) -> Feedback:
    """Draft after ``feedback``, score, keep what the rule accepts; returns the next feedback.

    A relaxed rule's excess is measured in every one.
    """
    target, drafter, rule = parts
    tree = drafter.propose(feedback, uniforms)
    with clock("verify"):
        output = target.score(tree)
    result = decide(rule, tree, output.probs, uniforms, measure=not rule.exact)
    tokens = committed(tree, result)
    result.kept = progress.take(tokens, result.kept)  # a finished row keeps nothing
    target.commit(result)
    return Feedback(output, result.next_token, tree, result, tokens)


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

    Yields after each round, and once more with the run's stats. A finished row keeps nothing more,
    unless a sample of the ``queue`` takes it over (see :mod:`specmm.continuous_batching`). Raises
    ``ValueError`` when the target's logits or the drafter's distributions are not finite (before
    the round's tokens are yielded, or after the next round where ``play`` is ``ahead``), and for a
    rule that the drafter's drafts do not allow.
    """
    check_rule(drafter, rule)
    start = time.perf_counter()
    clock = Clock(sync)
    with attention_of_any_length():
        with clock("verify"):
            output = target.prefill(prompt, drafter.max_nodes)
        token = first_token(rule, output.probs[:, -1:], uniforms.draw(1)[:, 0])
        feedback = Feedback(output, token)
        drafter.begin(feedback, clock)
    progress = begun(token, length, drafter.max_depth + 1, stop)
    histogram = token.new_zeros(len(token), drafter.max_depth + 2)
    depths: list[int] = []
    parts = (target, drafter, rule)
    most = drafter.max_depth + 1  # tokens of a round
    unproved = rule.exact and not proved(rule)
    progress.ahead = getattr(play, "ahead", False)
    checks = LateChecks(progress.ahead)
    while progress.unfinished(len(depths) * most < length - 1, most) or (queue and queue.left):
        with attention_of_any_length(), checks.of_a_round():
            feedback = play(parts, feedback, progress, uniforms, clock)
            tree, result = feedback.drafted
            # a rule took ratios of these
            if tree.probs is not None and tree.shape.size > 1:
                check_finite(tree.probs[:, 1:], len(depths), "the drafter")
        if unproved:
            progress.trees.add(tree)
        progress.observe(result, histogram)
        progress.end_round()
        with clock("verify"):
            checks.end_round()
        tell(DecodedRound(tree, feedback.output.probs, rule, result))
        depths.append(tree.levels)
        look_again()
        if queue is not None and progress.may_have_ended:
            _fill_rows(queue, progress, histogram, feedback, parts, uniforms, clock)
        yield progress
    with clock("verify"):
        checks.settle()
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
    token = categorical(output.probs[:, -1], uniforms.draw(1)[:, 0])
    progress = begun(token, length, 0, stop)
    one = torch.ones_like(token)
    steps = 0
    while progress.unfinished(sure=True) and steps < length - 1:
        with attention_of_any_length(), clock("verify"):
            output = target.step(token)
        token = categorical(output.probs[:, 0], uniforms.draw(1)[:, 0])
        progress.take(token[:, None], one)
        steps += 1
        look_again()
        yield progress
    histogram = torch.stack([torch.zeros_like(one), progress.counts - 1], dim=1)
    progress.stats = _stats(histogram, steps, time.perf_counter() - start, clock)
    yield progress


def _fill_rows(
    queue: Queue,
    progress: Progress,
    histogram: Tensor,
    feedback: Feedback,
    parts: Parts,
    uniforms: Uniforms,
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
            token = first_token(rule, output.probs[:, -1:], numbers)
            begin_anew(feedback, row, output, token)
            progress.restart(row, token)


def first_token(rule: Rule, probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token [B] after the prefill's ``probs`` [B, 1, V]: what ``rule`` emits without drafts.

    ``uniforms`` is [B]. For most rules this samples ``probs``. Rules of greedy decoding, which see
    the softmax of the logits, take the mode.
    """
    root = probs.new_zeros(len(probs), 1, dtype=torch.int64)
    alone = DraftTree(root, TreeShape.chain(0, probs.device), probs)
    return categorical(rule.decisions(alone, probs).next_probs[:, 0], uniforms)


def room(tokens: int) -> int:
    """Room for ``tokens``: the next power of two of ``ROOM``."""
    found = ROOM
    while found < tokens:
        found *= 2
    return found


def begun(token: Tensor, length: int, spare: int, stop: Stop | None = None) -> Progress:
    """The progress of rows of ``length`` tokens that begin with ``token`` [B], with room for
    ``spare`` more.
    """
    with torch.inference_mode(False):  # as a cache's: a compiled round writes them
        tokens = token.new_zeros(len(token), room(length + spare) if spare else length)
    none = torch.zeros_like(token)
    excess = torch.zeros((), device=token.device)
    limits = torch.full_like(none, length)
    progress = Progress(tokens, none, limits, Stats(), excess, excess.clone(), stop, length)
    progress.take(token[:, None], torch.ones_like(token))
    return progress


def _stats(histogram: Tensor, rounds: int, seconds: float, clock: Clock) -> Stats:
    kept = histogram[:, 1:].sum(0).tolist()
    return Stats(
        tokens=len(histogram) + sum(n * (i + 1) for i, n in enumerate(kept)),
        rounds=sum(kept),
        batch_rounds=rounds,
        seconds=seconds,
        draft_seconds=clock.seconds["draft"],
        verify_seconds=clock.seconds["verify"],
        search_seconds=clock.seconds["search"],
        kept=kept,
        prefilled=len(histogram),
        kept_by_row=histogram[:, 1:].tolist(),
    )
