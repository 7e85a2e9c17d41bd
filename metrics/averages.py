"""Means of streamed values, and pairs of streams that must be equally long."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from statistics import NormalDist
from typing import TypeVar

from torch import Tensor

from specmm.metrics.measurement import Interval

A = TypeVar("A")
B = TypeVar("B")
END = object()


class Mean:
    """The mean of the values seen so far and its interval, by count, mean and squared deviations
    (Chan et al. 1983).
    """

    def __init__(self) -> None:
        self.count, self.value, self._deviations = 0, 0.0, 0.0

    def update(self, values: Tensor) -> None:
        """Add values [n]; they are summed in float64."""
        found = values.double()
        count, mean = len(found), float(found.mean())
        apart, total = mean - self.value, self.count + count
        self._deviations += (
            float((found - mean).square().sum()) + apart**2 * self.count * count / total
        )
        self.value += apart * count / total
        self.count = total

    def interval(self, level: float = 0.95) -> Interval | None:
        """The normal interval of the mean, None below two values."""
        if self.count < 2:
            return None
        error = math.sqrt(self._deviations / (self.count - 1) / self.count)
        reach = NormalDist().inv_cdf((1 + level) / 2) * error
        return Interval(
            self.value - reach, self.value + reach, level, f"normal, {self.count} pairs"
        )


def pairs(first: Iterable[A], second: Iterable[B], what: str) -> Iterator[tuple[A, B]]:
    """Both streams side by side; raises ``ValueError`` where one ends before the other, or both are
    empty.
    """
    number = 0
    for number, (one, two) in enumerate(itertools.zip_longest(first, second, fillvalue=END), 1):
        if one is END or two is END:
            more = "first" if two is END else "second"
            raise ValueError(
                f"{what} must be equally many, got number {number} of the {more} only; pair them up"
            )
        yield one, two  # type: ignore[misc]  # neither is END
    if not number:
        raise ValueError(f"{what} must be at least one pair, got none; pass some")
