"""The one loop: draft a tree, score it in one forward, keep what the rule accepts.

Shape letters: B batch, T tokens wanted, N nodes, D deepest level.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from specmm.continuous_batching import Queue, begin_anew
from specmm.drafter import Drafter, Feedback, committed
from specmm.processors import check_finite
from specmm.randomness import Uniforms, UniformSource, categorical
from specmm.stats import Clock, Stats
from specmm.stopping import Stop
from specmm.target import Target
from specmm.tree import DraftTree, TreeShape
from specmm.verify.deciding import decide
from specmm.verify.rule import Rule, VerifyResult

# the least that a row's tokens are given where programs may be compiled; twice as much for more,
# and so on
ROOM = 256
MEASURE_EVERY = (
    8  # rounds between two measurements of a relaxed rule's excess: it costs a second recursion
)


@dataclass
class Progress:
    """The state after a round: ``tokens`` [B, T or more] of which each row's first ``counts`` [B]
    are committed.

    A row ends at its number of ``limits`` [B], which ``stop`` may lower.
    """

    tokens: Tensor
    counts: Tensor
    limits: Tensor
    stats: Stats
    excess: Tensor  # summed over the measured rounds of all rows
    measured: Tensor  # tokens of those rounds
    stop: Stop | None = None
    length: int = 0  # T
    gained: tuple[Tensor, Tensor] | None = (
        None  # of the last round, tokens taken and tokens the rule kept [B]
    )

    def restart(self, row: int, token: Tensor) -> None:
        """A new sample begins in ``row`` with ``token`` [1], which may end it."""
        before = self.counts.clone()
        self.tokens[row, 0], self.counts[row], self.limits[row], before[row] = (
            token[0],
            1,
            self.length,
            0,
        )
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
        """Commit the first ``kept`` [B] of ``tokens`` [B, D + 1]; returns how many of them the row
        had use for [B].
        """
        where = self.counts[:, None] + torch.arange(tokens.shape[1], device=kept.device)
        self.tokens.scatter_(1, where, tokens)
        before, after = self.counts, torch.minimum(self.counts + kept, self.limits)
        if self.stop is not None:
            after, done = self.stop(self.tokens, before, after)
            self.limits = torch.where(done, after, self.limits)
        self.counts = after
        taken = after - before
        self.gained = taken, kept
        return taken

    def unfinished(self, sure: bool = False) -> bool:
        """Whether a row lacks tokens; only a stop makes us look when the caller is ``sure`` of it."""
        return (sure and self.stop is None) or bool((self.counts < self.limits).any())

    def observe(self, result: VerifyResult, histogram: Tensor) -> None:
        """Count a round; ``histogram`` [D + 2] counts sample rounds by tokens committed."""
        kept, excess = result.kept, result.excess
        histogram.scatter_add_(0, kept, torch.ones_like(kept))
        if excess is not None:
            counted = torch.arange(excess.shape[1], device=kept.device) < kept[:, None]
            self.excess += (excess * counted).sum()
            self.measured += kept.sum()


Parts: TypeAlias = tuple[Any, Any, Rule]
"""Target, drafter, rule."""
Play: TypeAlias = Callable[[Parts, Feedback, Progress, UniformSource, Clock, bool], Feedback]


def one_round(
    parts: Parts,
    feedback: Feedback,
    progress: Progress,
    uniforms: UniformSource,
    clock: Clock,
    measure: bool,
) -> Feedback:
    """Draft after ``feedback``, score, keep what the rule accepts; returns what the next round
    begins with.

    ``measure`` asks a relaxed rule for its excess.
    """
    target, drafter, rule = parts
    tree = drafter.propose(feedback, uniforms)
    with clock("verify"):
        output = target.score(tree)
    result = decide(rule, tree, output.probs, uniforms, measure=measure)
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
    """Generate ``length`` tokens, or up to ``stop``, for every row of ``prompt``, yielding after
    each round.

    Rows accept different lengths and none waits for another; a finished row keeps nothing further,
    unless a sample of the ``queue`` takes it over (which needs a target and a drafter that admit).
    The stats of the last yield are those of the run. ``play`` is what plays a round. Raises
    ``ValueError`` when the target's logits or the drafter's distributions are not finite.
    """
    start, clock = time.perf_counter(), Clock(sync)
    with clock("verify"):
        output = target.prefill(prompt, drafter.max_nodes)
    token = first_token(rule, output.probs[:, -1:], uniforms.draw(1)[:, 0])
    feedback = Feedback(output, token)
    drafter.begin(feedback, clock)
    progress = _start(token, length, drafter.max_depth + 1, stop)
    histogram = torch.zeros(drafter.max_depth + 2, dtype=torch.int64, device=token.device)
    depths: list[int] = []
    parts = target, drafter, rule
    while progress.unfinished(sure=len(depths) * (drafter.max_depth + 1) < length - 1) or (
        queue and queue.left
    ):
        measure = not rule.exact and len(depths) % MEASURE_EVERY == 0
        feedback = play(parts, feedback, progress, uniforms, clock, measure)
        tree, result = feedback.drafted
        if (
            tree.probs is not None and tree.shape.size > 1
        ):  # a rule took ratios of them, but nothing has left yet
            check_finite(tree.probs[:, 1:], len(depths), "the drafter")
        progress.observe(result, histogram)
        depths.append(tree.levels)
        if queue is not None:
            _fill_rows(queue, progress, feedback, parts, uniforms, clock)
        yield progress
    if queue is not None:
        for row in range(len(token)):
            queue.collect(row, progress.row(row))
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
    """Generate ``length`` tokens (or up to ``stop``) one at a time, on the target's fastest path:
    the baseline.
    """
    start, clock = time.perf_counter(), Clock(sync)
    with clock("verify"):
        output = target.prefill(prompt, 0)
    token = categorical(output.probs[:, -1], uniforms.draw(1)[:, 0])
    progress, one, steps = _start(token, length, 0, stop), torch.ones_like(token), 0
    while progress.unfinished(sure=True) and steps < length - 1:
        with clock("verify"):
            output = target.step(token)
        token = categorical(output.probs[:, 0], uniforms.draw(1)[:, 0])
        progress.take(token[:, None], one)
        steps += 1
        yield progress
    histogram = torch.stack([torch.zeros_like(one[0]), progress.counts.sum() - len(token)])
    progress.stats = _stats(histogram, steps, time.perf_counter() - start, clock)
    yield progress


def _fill_rows(
    queue: Queue,
    progress: Progress,
    feedback: Feedback,
    parts: Parts,
    uniforms: Uniforms,
    clock: Clock,
) -> None:
    """Let samples of the ``queue`` take over the rows that are finished."""
    target, drafter, rule = parts
    while queue.left and (
        ended := progress.ended()
    ):  # again: a sample may end with its first token
        for row in ended[: queue.left]:
            queue.collect(row, progress.row(row))
            output, numbers = queue.start_row(row, target, drafter, uniforms, clock)
            token = first_token(rule, output.probs[:, -1:], numbers)
            begin_anew(feedback, row, output, token)
            progress.restart(row, token)


def first_token(rule: Rule, probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token [B] after the prefill's ``probs`` [B, 1, V]: what ``rule`` emits after a tree
    without drafts.

    ``uniforms`` [B] are uniforms. For most rules a draw from the distribution; for those of greedy
    decoding, whose distributions are softened, its mode.
    """
    alone = DraftTree(
        probs.new_zeros(len(probs), 1, dtype=torch.int64), TreeShape.chain(0, probs.device), probs
    )
    return categorical(rule.decisions(alone, probs).next_probs[:, 0], uniforms)


def room(tokens: int) -> int:
    """Room for ``tokens``, rounded up so that texts of many lengths share a program."""
    found = ROOM
    while found < tokens:
        found *= 2
    return found


def _start(token: Tensor, length: int, spare: int, stop: Stop | None) -> Progress:
    with torch.inference_mode(False):  # as a cache's: a compiled round writes them
        tokens = token.new_zeros(len(token), room(length + spare) if spare else length)
    none = torch.zeros_like(token)
    excess = torch.zeros((), device=token.device)
    progress = Progress(
        tokens, none, torch.full_like(none, length), Stats(), excess, excess.clone(), stop, length
    )
    progress.take(token[:, None], torch.ones_like(token))
    return progress


def _stats(histogram: Tensor, rounds: int, seconds: float, clock: Clock) -> Stats:
    kept = histogram[1:].tolist()
    return Stats(
        tokens=sum(n * (i + 1) for i, n in enumerate(kept)),
        rounds=sum(kept),
        batch_rounds=rounds,
        seconds=seconds,
        draft_seconds=clock.seconds["draft"],
        verify_seconds=clock.seconds["verify"],
        search_seconds=clock.seconds["search"],
        kept=kept,
    )
