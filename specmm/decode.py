"""The one loop: draft a tree, score it in one forward, keep what the rule accepts.

Shape letters: B batch, T tokens wanted, N nodes, D deepest level.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmm.drafter import Drafter, Feedback, committed
from specmm.randomness import Uniforms, categorical
from specmm.stats import Clock, Stats
from specmm.target import Target
from specmm.tree import DraftTree, TreeShape
from specmm.verify.rule import Rule, decide

MEASURE_EVERY = 8  # rounds between two measurements of a relaxed rule's excess: it costs a second recursion


@dataclass
class Progress:
    """The state behind a round: ``tokens`` [B, T + spare] of which each row's first ``counts`` [B] are committed."""

    tokens: Tensor
    counts: Tensor
    stats: Stats
    excess: Tensor  # summed over the measured rounds of all rows
    measured: Tensor  # tokens of those rounds

    def observe(self, feedback: Feedback, tally: Tensor) -> None:
        """Take in a round; ``tally`` [D + 2] counts sample rounds by tokens committed."""
        assert feedback.verdict is not None and feedback.tokens is not None
        kept, excess = feedback.verdict.kept, feedback.verdict.excess
        where = self.counts[:, None] + torch.arange(feedback.tokens.shape[1], device=kept.device)
        self.tokens.scatter_(1, where, feedback.tokens)
        self.counts += kept
        tally.scatter_add_(0, kept, torch.ones_like(kept))
        if excess is not None:
            self.excess += (excess * (kept > 0)).sum()
            self.measured += kept.sum()


@torch.inference_mode()
def decode(
    target: Target, drafter: Drafter, rule: Rule, prompt: Any, length: int, uniforms: Uniforms, sync: bool = False
) -> Iterator[Progress]:
    """Generate ``length`` tokens for every row of ``prompt``, yielding after each round.

    Rows accept different lengths and none waits for another; a finished row keeps nothing further. The stats of the
    last yield are those of the run.
    """
    start, clock = time.perf_counter(), Clock(sync)
    with clock("verify"):
        output = target.prefill(prompt, drafter.max_nodes)
    token = first_token(rule, output.laws[:, -1:], uniforms)
    feedback = Feedback(output, token)
    drafter.begin(feedback, clock)
    progress = _start(token, length + drafter.max_depth + 1)
    tally = torch.zeros(drafter.max_depth + 2, dtype=torch.int64, device=token.device)
    rounds = 0
    while rounds * (drafter.max_depth + 1) < length - 1 or bool((progress.counts < length).any()):
        tree = drafter.propose(feedback, uniforms)
        with clock("verify"):
            output = target.score(tree)
        verdict = decide(rule, tree, output.laws, uniforms, measure=not rule.exact and rounds % MEASURE_EVERY == 0)
        tokens = committed(tree, verdict)
        verdict.kept = torch.minimum(verdict.kept, length - progress.counts)  # a finished row keeps nothing
        target.commit(verdict)
        feedback = Feedback(output, verdict.next_token, tree, verdict, tokens)
        progress.observe(feedback, tally)
        rounds += 1
        yield progress
    progress.stats = _stats(tally, rounds, time.perf_counter() - start, clock)
    yield progress


@torch.inference_mode()
def decode_plain(
    target: Target, prompt: Any, length: int, uniforms: Uniforms, sync: bool = False
) -> Iterator[Progress]:
    """Generate ``length`` tokens for every row one at a time, on the target's fastest path: the baseline."""
    start, clock = time.perf_counter(), Clock(sync)
    with clock("verify"):
        output = target.prefill(prompt, 0)
    token = categorical(output.laws[:, -1], uniforms.draw(1)[:, 0])
    progress = _start(token, length)
    for i in range(1, length):
        with clock("verify"):
            output = target.step(token)
        token = categorical(output.laws[:, 0], uniforms.draw(1)[:, 0])
        progress.tokens[:, i] = token
        progress.counts += 1
        yield progress
    tally = torch.tensor([0, (length - 1) * len(token)])
    progress.stats = _stats(tally, length - 1, time.perf_counter() - start, clock)
    yield progress


def first_token(rule: Rule, law: Tensor, uniforms: Uniforms) -> Tensor:
    """The token [B] behind the prefill's ``law`` [B, 1, V]: what ``rule`` emits after a tree without drafts.

    For most rules a draw from the law; for those of greedy decoding, whose laws are softened, its mode.
    """
    alone = DraftTree(law.new_zeros(len(law), 1, dtype=torch.int64), TreeShape.chain(0, law.device), law)
    return categorical(rule.decisions(alone, law).next_law[:, 0], uniforms.draw(1)[:, 0])


def _start(token: Tensor, size: int) -> Progress:
    tokens = token.new_zeros(len(token), size)
    tokens[:, 0] = token
    zero = torch.zeros((), device=token.device)
    return Progress(tokens, torch.ones_like(token), Stats(), zero.clone(), zero.clone())


def _stats(tally: Tensor, rounds: int, seconds: float, clock: Clock) -> Stats:
    kept = tally[1:].tolist()
    return Stats(
        tokens=sum(n * (i + 1) for i, n in enumerate(kept)),
        rounds=sum(kept),
        batch_rounds=rounds,
        seconds=seconds,
        draft_seconds=clock.seconds["draft"],
        verify_seconds=clock.seconds["verify"],
        kept=kept,
    )
