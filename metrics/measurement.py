"""The result of every metric: a number, its protocol, and its confidence interval.

Two measurements are compared only if their protocols agree. ``read_measurements`` reads what
``specmm eval --json`` wrote.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specmm.metrics.features import Protocol, joint_protocol

BIASED = ("fid", "fd", "rfid")
SAMPLE_FACTS = ("counts", "files", "note")  # entries that say which samples were measured, not how


@dataclass(frozen=True)
class Interval:
    """A confidence interval of ``level``, computed by ``method``."""

    low: float
    high: float
    level: float
    method: str


@dataclass(frozen=True)
class Measurement:
    """The ``value`` of ``metric``; ``parts`` are the numbers that make it up."""

    metric: str
    value: float
    protocol: Protocol
    parts: dict[str, float] = field(default_factory=dict)
    interval: Interval | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Measurement:
        """The inverse of ``to_json``; raises ``ValueError`` for any other dictionary."""
        missing = ", ".join(sorted({"metric", "value", "protocol"} - set(found)))
        if missing:
            raise ValueError(f"a measurement must hold metric, value, protocol, got no {missing}")
        interval = Interval(**found["interval"]) if found.get("interval") else None
        parts = found.get("parts", {})
        return cls(found["metric"], found["value"], found["protocol"], parts, interval)


@dataclass(frozen=True)
class Difference:
    """``first`` minus ``second``, with the interval of independent samples if both have one."""

    metric: str
    value: float
    interval: Interval | None

    @property
    def differ(self) -> bool | None:
        """Whether the interval excludes 0; None without one."""
        return None if self.interval is None else not self.interval.low <= 0 <= self.interval.high


def difference(first: Measurement, second: Measurement) -> float:
    """``first`` minus ``second``; raises ``ValueError`` unless both were measured in one way."""
    if first.metric != second.metric:
        raise ValueError(f"both must be the same metric, got {first.metric} and {second.metric}")
    one, two = (
        {k: v for k, v in m.protocol.items() if k not in SAMPLE_FACTS} for m in (first, second)
    )
    lacking = sorted(set(one) ^ set(two))
    if lacking:
        raise ValueError(
            f"both must have the same protocol, got {lacking[0]!r} in one only; measure both alike"
        )
    joint_protocol(one, two)
    return first.value - second.value


def compare_results(first: Measurement, second: Measurement) -> Difference:
    """``first`` minus ``second``; raises ``ValueError`` unless both were measured in one way."""
    value = difference(first, second)
    one = first.interval
    two = second.interval
    if one is None or two is None or one.level != two.level:
        return Difference(first.metric, value, None)
    low = value - math.hypot(first.value - one.low, two.high - second.value)
    high = value + math.hypot(one.high - first.value, second.value - two.low)
    method = f"Zou and Donner, from a {one.method} and a {two.method}"
    return Difference(first.metric, value, Interval(low, high, one.level, method))


def unequal_counts(first: Measurement, second: Measurement) -> str:
    """A warning if sets of different sizes gave a metric that small sets bias, else ""."""
    one, two = (m.protocol.get("counts") for m in (first, second))
    if first.metric not in BIASED or one is None or two is None or one == two:
        return ""
    return f"{first.metric} depends on the number of pictures, here {one} and {two}: no comparison"


def read_measurements(path: Path) -> list[Measurement]:
    """The measurements in a result file; raises ``ValueError`` for any other file."""
    return parse_measurements(read_json(path), path)


def read_json(path: Path) -> Any:
    """The JSON value of ``path``; raises ``ValueError`` for any other file."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} must be JSON, got something else; write it with --json") from None


def parse_measurements(value: Any, path: Path) -> list[Measurement]:
    """The measurements in the JSON ``value`` of ``path``; raises ``ValueError`` without any."""
    if not isinstance(value, dict):
        got = type(value).__name__
        raise ValueError(f"{path} must hold one result of specmm eval --json, got a {got}")
    try:
        return [Measurement.from_json(result) for result in value.get("results", [value])]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must hold a result of specmm eval --json ({error})") from None
