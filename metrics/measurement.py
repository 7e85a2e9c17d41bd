"""What every metric returns: a number, what was measured, and how sure it is.

A difference between two numbers of different protocols means nothing, so ``difference`` refuses it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specmm.metrics.features import Protocol, joint_protocol

BIASED = ("fid", "fd", "rfid", "mifid")
SAMPLE_FACTS = ("counts", "note")  # entries that say which samples were measured, not how


@dataclass(frozen=True)
class Interval:
    """A confidence interval from ``low`` to ``high`` of ``level``, made by ``method`` (as
    "bootstrap of 1,000").
    """

    low: float
    high: float
    level: float
    method: str


@dataclass(frozen=True)
class Measurement:
    """The ``value`` of ``metric``; ``parts`` are the numbers it is made of, ``protocol`` says what
    was measured.
    """

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
        """What ``to_json`` gave; raises ``ValueError`` for any other dictionary."""
        missing = {"metric", "value", "protocol"} - set(found)
        if missing:
            raise ValueError(
                f"a measurement must hold metric, value and protocol, got no {', '.join(sorted(missing))}"
            )
        interval = found.get("interval")
        known = {k: found[k] for k in ("metric", "value", "protocol")} | {
            "parts": found.get("parts", {})
        }
        return cls(**known, interval=Interval(**interval) if interval else None)


def unequal_counts(first: Measurement, second: Measurement) -> str:
    """A warning where a metric that falls with the number of pictures was measured on other numbers
    of them.
    """
    counts = [m.protocol.get("counts") for m in (first, second)]
    if first.metric not in BIASED or None in counts or counts[0] == counts[1]:
        return ""
    return f"{first.metric} falls with the number of pictures, and these had {counts[0]} and {counts[1]}: no comparison"


def difference(first: Measurement, second: Measurement) -> float:
    """``first`` less ``second``; raises ``ValueError`` naming what differs unless both measured the
    same way.
    """
    if first.metric != second.metric:
        raise ValueError(
            f"both must be the same metric, got {first.metric} and {second.metric}; compare like with like"
        )
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
