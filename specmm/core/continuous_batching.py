"""Continuous batching: a row that has finished its sample takes the next waiting sample.

Rows accept different numbers of tokens, so a batch that waits for its slowest row leaves the others
idle. A waiting sample is prefilled alone, and the last feedback is rewritten for its row as if the
batch had just begun there. So a sample's tokens are the same as in a separate batch; each sample
has its own generator.

Shape letters: T tokens wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specmm.core.drafter import BatchingDrafter, Feedback
from specmm.core.randomness import Streams
from specmm.core.stats import Clock
from specmm.core.target import BatchingTarget, TargetOutput


class Queue:
    """Samples by number: the first ``rows`` samples begin in the batch, the others wait.

    ``prompt(i)`` returns sample i's prompt and is called once; ``generators[i]`` draws its
    uniforms. ``tokens`` holds the tokens of finished samples, ``kept`` their counts of rounds by
    committed tokens. ``tell(1)`` is called for each finished sample.
    """

    def __init__(
        self,
        prompt: Callable[[int], object],
        generators: Sequence[torch.Generator],
        rows: int,
        tell: Callable[[int], object] = lambda done: None,
    ) -> None:
        self.prompt = prompt
        self.generators = generators
        self.tell = tell
        self.holds = list(range(min(rows, len(generators))))  # the sample in each row
        self.tokens: list[Tensor] = [torch.empty(0)] * len(generators)
        self.kept: list[Tensor] = [torch.empty(0)] * len(generators)
        self.next = len(self.holds)

    @property
    def left(self) -> int:
        """The number of samples that have no row yet."""
        return len(self.generators) - self.next

    def collect(self, row: int, tokens: Tensor, kept: Tensor) -> None:
        """Store the ``tokens`` [T] of ``row``'s sample, and its rounds by committed tokens."""
        self.tokens[self.holds[row]] = tokens.clone()
        self.kept[self.holds[row]] = kept.clone()
        self.tell(1)

    def start_row(
        self,
        row: int,
        target: BatchingTarget,
        drafter: BatchingDrafter,
        uniforms: Streams,
        clock: Clock,
    ) -> tuple[TargetOutput, Tensor]:
        """Start the next sample in ``row``; returns its prefill's output and a uniform [1]."""
        self.holds[row] = self.next
        numbers = uniforms.start_row(row, self.generators[self.next])
        with clock("verify"):
            output = target.start_row(row, self.prompt(self.next))
        drafter.start_row(row)
        self.next += 1
        return output, numbers


def begin_anew(feedback: Feedback, row: int, output: TargetOutput, token: Tensor) -> None:
    """Rewrite the ``feedback`` of ``row`` in place, as if its last round had been the prefill with
    ``output`` and ``token`` [1].
    """
    result = feedback.result
    batch = len(feedback.token)
    assert result is not None and feedback.tokens is not None
    result.path[row] = -1
    result.path[row, 0] = 0
    result.kept[row] = 1
    result.next_token[row] = token[0]
    feedback.token[row] = feedback.tokens[row, 0] = token[0]
    feedback.output.probs[row] = output.probs[0, -1]
    feedback.output.hidden[row::batch] = output.hidden[:, -1:]
    if feedback.fresh is None:
        feedback.fresh = torch.zeros(batch, dtype=torch.bool, device=token.device)
    feedback.fresh[row] = True
