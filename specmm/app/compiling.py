"""Whether a race of pictures is compiled: both methods or neither, so that the two stay comparable.

A session's races are timed as they go. Once programs pay for both methods (:mod:`when_compiled`),
they are built before the next race, outside the clock. Pictures of prompts are not compiled:
programs fit the length of one prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specmm.app.clock import Racer
from specmm.choose.when_compiled import Turn, Work


class RaceCompiling:
    """Decides whether races of the ``chosen`` methods are compiled. Each has its own pipeline among
    ``pipes``; ``options`` are for sampling.

    Raises ``ValueError`` for options out of range.
    """

    def __init__(
        self, pipes: Sequence[Any], chosen: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        self.turns: list[Turn[Any]] = []
        if all(pipe.takes == "classes" for pipe in pipes):
            pairs = zip(pipes, chosen, strict=True)
            self.turns = [p.turn("auto", p.target(**options), m, 1) for p, m in pairs]
        self.compiled = bool(self.turns) and all(turn.pays(1) for turn in self.turns)
        self.call = {"compiled": True} if self.compiled else {}

    @property
    def works(self) -> list[Work]:
        """The timing records of both sides."""
        return [turn.work for turn in self.turns if turn.work is not None]

    def build(self, make: Sequence[Callable[[], Racer]]) -> None:
        """Draw by the lanes that ``make`` gives whose programs are not there yet."""
        for work, lane in zip(self.works, make, strict=False):
            if self.compiled and not work.ready:
                start = time.perf_counter()
                finish(lane())
                work.observe(time.perf_counter() - start, 1, quick=True)

    def observe(self, lanes: Sequence[Racer]) -> None:
        """Note the seconds of ``lanes`` that have ended."""
        for work, lane in zip(self.works, lanes, strict=False):
            work.observe(lane.clock.seconds, 1, quick=self.compiled)


def finish(lane: Racer) -> None:
    """Let it run to its end."""
    try:
        while lane.out is None:
            lane.advance(math.inf)
    finally:
        lane.close()
