"""Continuous batching: a row that has finished its sample takes up the next one that waits.

Rows accept different lengths, so a batch that waits for its slowest row leaves the others idle. A
sample that takes up a row is prefilled alone; what the last round gave is rewritten for it, as if
the batch had just begun there, so its tokens are those it would have had from the start (each
sample has its own generator).

Shape letters: B rows, G guidance branches, N nodes, V vocabulary, C width, T tokens wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specmm.drafter import Feedback
from specmm.randomness import Uniforms
from specmm.stats import Clock
from specmm.target import TargetOutput


@runtime_checkable
class BatchingTarget(Protocol):
    """A target whose rows can begin anew while the others go on."""

    def start_row(self, row: int, prompt: Any) -> TargetOutput:
        """Prefill ``prompt``, of one sample, in place of what ``row`` held; its own distributions
        and hidden states.
        """
        ...


@runtime_checkable
class BatchingDrafter(Protocol):
    """A drafter whose rows can begin anew.

    The feedback that follows says ``fresh`` of them, and that their round committed one token, the
    first.
    """

    def start_row(self, row: int) -> None:
        """Forget what ``row`` held and read the prompt that the target has just admitted, if any."""
        ...


class Queue:
    """Samples by number: the first B are the batch's, the others wait. ``tokens`` holds those of
    finished ones.

    ``prompt(i)`` is what sample i is prefilled with, asked for once; ``generators[i]`` its
    uniforms; ``tell(1)`` is called for every sample that is finished.
    """

    def __init__(
        self,
        prompt: Callable[[int], Any],
        generators: Sequence[torch.Generator],
        rows: int,
        tell: Callable[[int], Any] = lambda done: None,
    ) -> None:
        self.prompt, self.generators, self.tell = prompt, generators, tell
        self.holds = list(range(min(rows, len(generators))))  # the sample in each row
        self.tokens: list[Tensor] = [torch.empty(0)] * len(generators)
        self.next = len(self.holds)

    @property
    def left(self) -> int:
        """How many samples have no row yet."""
        return len(self.generators) - self.next

    def collect(self, row: int, tokens: Tensor) -> None:
        """Keep the ``tokens`` [T] of the sample in ``row``."""
        self.tokens[self.holds[row]] = tokens.clone()
        self.tell(1)

    def start_row(
        self,
        row: int,
        target: BatchingTarget,
        drafter: BatchingDrafter,
        uniforms: Uniforms,
        clock: Clock,
    ) -> tuple[TargetOutput, Tensor]:
        """Begin the next sample in ``row``: its prefill's output and the uniform [1] for its first
        token.
        """
        self.holds[row] = self.next
        numbers = uniforms.start_row(row, self.generators[self.next])
        with clock("verify"):
            output = target.start_row(row, self.prompt(self.next))
        drafter.start_row(row)
        self.next += 1
        return output, numbers


def begin_anew(feedback: Feedback, row: int, output: TargetOutput, token: Tensor) -> None:
    """Rewrite ``feedback`` for ``row``, in place: its round was the prefill ``output``, which gave
    ``token`` [1].
    """
    result, batch = feedback.result, len(feedback.token)
    assert result is not None and feedback.tokens is not None
    result.path[row], result.kept[row] = -1, 1
    result.path[row, 0], result.next_token[row] = 0, token[0]
    feedback.token[row] = feedback.tokens[row, 0] = token[0]
    feedback.output.probs[row] = output.probs[0, -1]
    feedback.output.hidden[row::batch] = output.hidden[:, -1:]
    if feedback.fresh is None:
        feedback.fresh = torch.zeros(batch, dtype=torch.bool, device=token.device)
    feedback.fresh[row] = True
