"""A batch whose rows join and leave between rounds, for serving engines.

Each row has its own limit, stop and generator. When a row leaves, the last row takes its place, so
that a batch has no idle rows. As in continuous batching, a row that joins is prefilled alone, and
the last feedback is rewritten for it as if the batch had just begun there. Token i of a row is
drawn by number i of its generator (:class:`specmm.verify.matching.Matching`): it does not depend on
the other rows or on drafts.

Shape letters: B rows, D deepest level, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specmm.core.continuous_batching import begin_anew
from specmm.core.decode import Progress, Stop, begun, first_token, one_round
from specmm.core.drafter import BatchingDrafter, Drafter, Feedback, committed
from specmm.core.randomness import RowNumbers
from specmm.core.stats import Clock
from specmm.core.target import Target, TargetOutput
from specmm.core.tree import DraftTree, TreeShape
from specmm.loading.hardware import attention_of_any_length
from specmm.verify.matching import Matching
from specmm.verify.rule import VerifyResult


@runtime_checkable
class Joining(Protocol):
    """A target, drafter or stop whose rows join and leave."""

    def join(self) -> None:
        """Add a row at the end, which is then started."""

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""


class RowStop(Stop, Joining, Protocol):
    """A stop with separate conditions for each row."""


class Rows:
    """A batch of ``target``, ``drafter`` and ``stop``, in which rows join and leave together."""

    def __init__(self, target: Target, drafter: Drafter, stop: RowStop) -> None:
        self.parts = (target, drafter, Matching())
        self.members = [member for member in (target, drafter, stop) if isinstance(member, Joining)]
        self.stop = stop
        self.clock = Clock()
        self.uniforms = RowNumbers()
        self.progress: Progress
        self.feedback: Feedback
        self.count = 0  # B

    def join(
        self, generator: torch.Generator, begin: Callable[[int], TargetOutput], limit: int
    ) -> int:
        """Add a row of at most ``limit`` tokens, which draws from ``generator``; returns the row's
        number.

        ``begin(row)`` moves an already read prompt into the row and returns its last output, which
        is finite.
        """
        target, drafter, rule = self.parts
        row = self.count
        for member in self.members:
            member.join()
        output = begin(row)
        spare = drafter.max_depth + 1
        numbers = self.uniforms.join(generator, limit + spare)
        token = first_token(rule, output.probs[:, -1:], numbers)
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
        """Remove ``row``; the last row takes its number."""
        for member in self.members:
            member.leave(row)
        self.count -= 1
        self.uniforms.leave(row)
        if self.count:
            self.progress.leave(row)
            self.feedback = self.feedback.left(row)

    def round(self) -> Sequence[int]:
        """Run one round; returns each row's number of new tokens. Call :meth:`check` next."""
        before = self.progress.counts.tolist()
        self.uniforms.counts = self.progress.counts
        with attention_of_any_length():
            self.feedback = one_round(
                self.parts, self.feedback, self.progress, self.uniforms, self.clock
            )
        after = self.progress.counts.tolist()
        return [b - a for a, b in zip(before, after, strict=True)]

    def check(self) -> None:
        """Raise ``ValueError`` unless all numbers of the last round are finite."""
        assert self.feedback.checks is not None
        self.progress.end_round(self.feedback.checks)


def _as_if_played(output: TargetOutput, token: Tensor) -> Feedback:
    """The feedback for a row that begins with ``token`` [1], in the form that a round gives."""
    last = TargetOutput(output.probs[:, -1:], output.hidden[:, -1:])
    none = torch.zeros_like(token)[:, None]
    tree = DraftTree(none, TreeShape.chain(0, token.device))
    result = VerifyResult(none, torch.ones_like(token), token.clone())
    fresh = torch.ones_like(token, dtype=torch.bool)
    tokens = committed(tree, result)
    return Feedback(last, token.clone(), tree, result, tokens, fresh, result.kept.clone())
