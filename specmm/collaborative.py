"""Models that take turns over the steps of one sample: CoDe's schedule (arXiv 2411.17787).

Nothing is verified. What the first model has drawn stays, and the second continues from it, so the
output follows neither model's distribution. The certificate is ``heuristic``, unless one model
draws everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specmm.stats import Certificate, Clock


class Worker(Protocol):
    """A model with its caches for one batch."""

    def step(self, k: int) -> None:
        """Do step ``k``; what other models have done before it is known."""


@dataclass(frozen=True)
class Turn:
    """The ``steps`` of one model; ``open(steps)`` makes its worker, ``part`` names its time."""

    model: str
    part: str
    steps: range
    open: Callable[[range], Worker]


def split(total: int, at: int) -> tuple[range, range]:
    """Steps of the first and the second of two models: the first does ``at`` of ``total``.

    Raises ``ValueError`` unless ``at`` is a whole number from 0 to ``total``.
    """
    if not isinstance(at, int) or not 0 <= at <= total:
        raise ValueError(
            f"n must be a whole number from 0 (the second model alone) to {total} (the first), "
            f"got {at!r}"
        )
    return range(at), range(at, total)


def alternate(turns: Sequence[Turn], clock: Clock) -> Iterator[int]:
    """Do the steps of ``turns`` one after the other, yielding the number of each.

    A worker's memory is freed before the next is opened.
    """
    for turn in turns:
        if not turn.steps:
            continue
        with clock(turn.part):
            worker = turn.open(turn.steps)
        for k in turn.steps:
            with clock(turn.part):
                worker.step(k)
            yield k
        del worker


def certificate(turns: Sequence[Turn], target: str) -> Certificate:
    """What a run may claim about the distribution of the model called ``target``."""
    steps = {turn.model: len(turn.steps) for turn in turns if turn.steps}
    if set(steps) == {target}:
        return Certificate("exact", "plain decoding of the target", 0.0)
    shares = ", ".join(f"{count} by {model}" for model, count in steps.items())
    return Certificate("heuristic", f"nothing is verified: steps {shares}")
