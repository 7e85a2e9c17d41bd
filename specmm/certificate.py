"""What a run may claim about the distribution of its output.

``exact``: the output has the target's distribution. ``bounded``: it differs, and ``tv`` is a
measured bound on the total variation per token; summed over a sample's tokens it bounds the
sample's. ``heuristic``: nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Certificate:
    """Kind, reason, and the measured total variation per token (0 when exact, None when nothing is
    claimed).

    ``settings`` name the distribution that is meant: the model's under these options (temperature,
    guidance, filters, iterations …). With other settings the model has another one.
    """

    kind: Literal["exact", "bounded", "heuristic"]
    reason: str
    tv: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.kind == "bounded") != (self.tv is not None and self.kind != "exact"):
            raise ValueError(
                f"a {self.kind} certificate must {'' if self.kind == 'bounded' else 'not '}hold a tv"
            )

    def under(self, settings: Mapping[str, Any]) -> Certificate:
        """The same claim about the model's distribution under ``settings``."""
        return replace(self, settings=dict(settings))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """One line for people."""
        tv = (
            ""
            if self.kind != "bounded"
            else f", total variation a token below {self.tv:.4f} on average (measured)"
        )
        named = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{self.kind}{tv}: {self.reason}" + (f" (the model at {named})" if named else "")


def of_rule(name: str, exact: bool, excess: float | None) -> Certificate:
    """Certificate of a run verified by a rule; ``excess`` is the mean measured excess per token of
    a relaxed one.
    """
    if exact:
        return Certificate(
            "exact",
            f"every token kept or drawn by the {name} rule follows the target's distribution",
            0.0,
        )
    if excess is None:
        return Certificate("heuristic", f"the {name} rule is relaxed and no round was measured")
    return Certificate(
        "bounded", f"the {name} rule is relaxed; measured on the rounds of this run", excess
    )


def merged(parts: Sequence[tuple[Certificate, float]]) -> Certificate | None:
    """What several runs may claim together: the least of them, total variations averaged by the
    ``parts``' weights.

    None of no runs.
    """
    if not parts:
        return None
    order = ("exact", "bounded", "heuristic")
    least = max((part for part, _ in parts), key=lambda part: order.index(part.kind))
    if least.kind != "bounded":
        return least
    total = sum(weight for _, weight in parts)
    return replace(least, tv=sum((part.tv or 0.0) * weight for part, weight in parts) / total)
