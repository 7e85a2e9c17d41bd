"""Speed-ups from seconds: measured, ideal, and how much of the ideal is realised."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from specmm.core.stats import Stats
from specmm.core.stats import quartiles as quartiles
from specmm.core.stats import speedup as speedup


def paired_speedup(baseline: Sequence[float], seconds: Sequence[float]) -> float:
    """Median of the ratios of runs made side by side: it lies between their quartiles."""
    return statistics.median(b / s for b, s in zip(baseline, seconds, strict=True))


def ideal_speedup(tau: float, plain_step: float, draft: float, verify: float) -> float:
    """Ideal speed-up: tau tokens for the model forwards of one round, in seconds by round."""
    return tau * plain_step / (draft + verify)


def level_rates(kept: Sequence[int]) -> list[float]:
    """By level d of ``Stats.kept``: of the rounds that kept level d - 1, the share that kept d."""
    reached = [sum(kept[i:]) for i in range(len(kept))]
    return [b / a for a, b in pairwise(reached) if a]


def round_times(stats: Stats, baseline_seconds: float, baseline_tokens: int) -> dict[str, Any]:
    """A method's summed ``stats`` next to plain decoding's loop seconds and tokens, at batch 1.

    Everything here is about the token loop; drawing the pixels is in the wall clock's speed-up.
    """
    draft, verify = (
        s / max(stats.batch_rounds, 1) for s in (stats.draft_seconds, stats.verify_seconds)
    )
    plain_step = baseline_seconds / baseline_tokens
    ideal = ideal_speedup(stats.tau, plain_step, draft, verify)
    loop = plain_step / (stats.seconds / max(stats.tokens, 1))
    return {
        "tau": stats.tau,
        "host_overhead": stats.host_overhead,
        "draft_ms": 1000 * draft,
        "verify_ms": 1000 * verify,
        "plain_step_ms": 1000 * plain_step,
        "loop_speedup": loop,
        "ideal": ideal,
        "realised": loop / ideal,
    }
