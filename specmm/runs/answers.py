"""What a run of answers or texts was, as a record."""

from __future__ import annotations

from typing import Any

from specmm.runs.models import place_of


def report_of(
    model: str,
    pipe: Any,
    method: Any,
    out: Any,
    seed: int,
    seconds: float,
    sampling: dict[str, Any],
) -> dict[str, Any]:
    """What was done and how long it took, for JSON; ``out`` is what ``pipe`` gave."""
    return {
        "model": model,
        "method": out.method,
        "method_options": {k: v for k, v in vars(method).items() if v is not None},
        "seed": seed,
        **place_of(pipe.model),
        "seconds": seconds,
        "tokens": sum(map(len, out.tokens)),
        "rounds": out.stats.rounds,
        "tau": out.stats.tau,
        "certificate": out.certificate.as_dict(),
        "sampling": sampling,
    }
