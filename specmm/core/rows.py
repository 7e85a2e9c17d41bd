"""A batch whose rows join and leave between rounds: what engines play.

Each row has its own limit, stop and generator. A row that leaves gives its place to the last one,
so that the rows of a batch are always those that are answered. As in continuous batching, a row
that joins is prefilled by itself, and the last feedback is rewritten for it as if the batch had
just begun there: its tokens are those it would have by itself.

Shape letters: B rows, D deepest level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specmm.core.continuous_batching import begin_anew
from specmm.core.decode import Progress, Stop, begun, check_output, first_token, one_round
from specmm.core.drafter import BatchingDrafter, Drafter, Feedback, committed
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.target import Target, TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.loading.hardware import attention_of_any_length
from specmm.verify.rule import Rule, VerifyResult


@runtime_checkable
class Joining(Protocol):
    """A target, drafter or stop whose rows join and leave."""

    def join(self) -> None:
        """One more row, the last, which is then started."""

    def leave(self, row: int) -> None:
        """Without ``row``, whose place the last one takes."""


class RowStop(Stop, Joining, Protocol):
    """A stop that knows what ends each row."""


class Rows:
    """The rows of ``target``, drafted for by ``drafter``; ``stop`` ends them. All of these join and
    leave together.
    """

    def __init__(self, target: Target, drafter: Drafter, rule: Rule, stop: RowStop) -> None:
        self.parts = (target, drafter, rule)
        self.members = [part for part in (target, drafter, stop) if isinstance(part, Joining)]
        self.stop = stop
        self.clock = Clock()
        self.uniforms: Uniforms
        self.progress: Progress
        self.feedback: Feedback
        self.count = 0  # B
        self.rounds = 0

    def join(
        self, generator: torch.Generator, begin: Callable[[int], TargetOutput], limit: int
    ) -> int:
        """One more row of at most ``limit`` tokens, which draws from ``generator``; its number.

        ``begin(row)`` puts a prompt there that has been read, and gives the last output of that.
        """
        target, drafter, rule = self.parts
        row = self.count
        for member in self.members:
            member.join()
        output = begin(row)
        check_output(output, target.name)
        if row:
            numbers = self.uniforms.join(generator)
        else:
            self.uniforms = Uniforms([generator])
            numbers = self.uniforms.draw(1)[:, 0]
        token = first_token(rule, output.probs[:, -1:], numbers)
        spare = drafter.max_depth + 1
        if row:
            self.progress.join()
            self.progress.widen(limit + spare)
            self.feedback = self.feedback.joined()
            begin_anew(self.feedback, row, output, token)
            assert isinstance(drafter, BatchingDrafter)
            drafter.start_row(row)
        else:
            self.progress = begun(token, limit, spare)
            self.progress.stop, self.progress.name = self.stop, target.name
            self.feedback = _as_if_played(output, token)
            drafter.begin(self.feedback, self.clock)
        self.count += 1
        self.progress.length = limit
        self.progress.restart(row, token)
        return row

    def leave(self, row: int) -> None:
        """``row`` is not answered any more; the last row has its number from now on."""
        for member in self.members:
            member.leave(row)
        self.count -= 1
        if self.count:
            self.uniforms.leave(row)
            self.progress.leave(row)
            self.feedback = self.feedback.left(row)

    def round(self) -> Sequence[int]:
        """Play one; how many tokens each row gained."""
        before = self.progress.counts.tolist()
        with attention_of_any_length():
            self.feedback = one_round(
                self.parts, self.feedback, self.progress, self.uniforms, self.clock
            )
        assert self.feedback.checks is not None
        self.progress.end_round(self.feedback.checks)
        self.rounds += 1
        after = self.progress.counts.tolist()
        return [b - a for a, b in zip(before, after, strict=True)]


def _as_if_played(output: TargetOutput, token: Tensor) -> Feedback:
    """The feedback of a row that begins with ``token`` [1], in the form of a round's."""
    last = TargetOutput(output.probs[:, -1:], output.hidden[:, -1:])
    none = torch.zeros_like(token)[:, None]
    tree = DraftTree(none, TreeShape.chain(0, token.device))
    result = VerifyResult(none, torch.ones_like(token), token.clone())
    fresh = torch.ones_like(token, dtype=torch.bool)
    tokens = committed(tree, result)
    return Feedback(last, token.clone(), tree, result, tokens, fresh, result.kept.clone())
