"""Races two lanes by equal running time: the lane with fewer seconds decodes next.

A lane's clock runs only while its method does. It is stopped while the other lane runs and while
something is displayed, so previews cost neither method anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

SLICE = 0.1  # seconds that a lane runs at a time
EVERY = 0.25  # seconds from one view to the next
SHARE = 10.0  # and at least so many times the last view's seconds


class Stopwatch:
    """Adds up the ``seconds`` in which it runs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the seconds of the block."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for the block; used within ``running``."""
        self.seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


class Racer(Protocol):
    """One method's run."""

    clock: Stopwatch
    counts: list[int]  # tokens made after each round
    out: Any  # the pipeline's output; None until the end

    def advance(self, seconds: float) -> None:
        """Decode for ``seconds`` seconds, to the end of a round; raises the pipeline's errors."""

    def close(self) -> None:
        """Abandon the run."""


def race(lanes: Sequence[Racer], most: float, at_a_time: float = SLICE) -> Iterator[None]:
    """Run all ``lanes`` to their ends, in turns of ``at_a_time`` seconds; yields whenever they
    should be displayed, and at the end.

    Raises ``ValueError`` if a lane takes longer than ``most`` seconds.
    """
    shown_at = spent = 0.0
    while running := [lane for lane in lanes if lane.out is None]:
        behind = min(running, key=lambda lane: lane.clock.seconds)
        behind.advance(at_a_time)
        now = behind.clock.seconds
        if now > most:
            raise ValueError(
                f"a run may take {most:.0f} seconds, got longer; is the machine busy? Ask for less"
            )
        if now - shown_at > max(EVERY, SHARE * spent):
            begin = time.perf_counter()
            yield
            shown_at = now
            spent = time.perf_counter() - begin
    yield


def verdict(names: Sequence[str], seconds: Sequence[float]) -> str:
    """A sentence: which of two methods was faster, and by how much."""
    fast, slow = sorted(range(2), key=lambda i: seconds[i])
    ratio = seconds[slow] / seconds[fast]
    if names[fast] == names[slow]:
        return f"{names[fast]} on both sides: one took {ratio:.2f} times as long as the other"
    return f"{names[fast]} was {ratio:.2f} times as fast as {names[slow]}"
