"""Results of ``specmm eval --json`` read again, and compared without their samples."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmm.metrics.measurement import Interval, Measurement, difference


@dataclass(frozen=True)
class Difference:
    """``first`` less ``second`` of one metric; ``interval`` where both have one, as if their
    samples were independent.

    The interval is that of Zou and Donner (2008, eq. 4), made from the two intervals alone.
    """

    metric: str
    value: float
    interval: Interval | None

    @property
    def differ(self) -> bool | None:
        """Whether the interval excludes 0; None without one."""
        return None if self.interval is None else not self.interval.low <= 0 <= self.interval.high


def read_measurements(path: Path) -> list[Measurement]:
    """What a result file holds; raises ``ValueError`` for any other file."""
    try:
        return measurements(json.loads(path.read_text(encoding="utf-8")), path)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(
            f"{path} must be JSON, got something else; write it with specmm eval … --json"
        ) from None


def measurements(value: Any, path: Path) -> list[Measurement]:
    """The measurements in a result's JSON ``value``, read from ``path``; raises ``ValueError`` for
    anything else.
    """
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} must hold one result of specmm eval, got a {type(value).__name__}; write it with --json"
        )
    try:
        return [Measurement.from_json(found) for found in value.get("results", [value])]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold a result of specmm eval --json, got none ({error})"
        ) from None


def same_protocol(first: Measurement, second: Measurement) -> None:
    """Raise ``ValueError`` naming what differs unless both measured the same way."""
    difference(first, second)


def compare_results(first: Measurement, second: Measurement) -> Difference:
    """``first`` less ``second``; raises ``ValueError`` naming what differs unless both measured the
    same way.
    """
    value = difference(first, second)
    one, two = first.interval, second.interval
    if one is None or two is None or one.level != two.level:
        return Difference(first.metric, value, None)
    low = math.hypot(first.value - one.low, two.high - second.value)
    high = math.hypot(one.high - first.value, second.value - two.low)
    method = f"Zou and Donner, from a {one.method} and a {two.method}"
    return Difference(first.metric, value, Interval(value - low, value + high, one.level, method))
