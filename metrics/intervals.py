"""Confidence intervals: how much a number would vary with other samples (not its bias).

A bootstrap for means and U-statistics (Efron 1979). The Fréchet distance gets a delete-a-group
jackknife: resampling with replacement repeats samples, which lowers the covariance's rank and adds
to the bias. Shapes: N samples; B draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from specmm.metrics.features import FeatureSet
from specmm.metrics.frechet import FeatureStatistics, Gaussian, frechet_distance
from specmm.metrics.measurement import Interval

DRAWS_AT_ONCE = 64  # rows of weights held at a time for a mean
GROUPS = 20  # the groups of a jackknife
LEVEL = 0.95


@dataclass(frozen=True)
class Bootstrap:
    """``draws`` (2 or more) resamples from a CPU ``generator``."""

    generator: torch.Generator
    draws: int = 1000

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise ValueError(f"a bootstrap needs draws >= 2, got {self.draws}")

    def weights(self, count: int, draws: int | None = None) -> Tensor:
        """The number of times [B, N] float64 that each of ``count`` samples is in each resample."""
        weights = torch.zeros(draws or self.draws, count, dtype=torch.float64)
        for row in weights:
            drawn = torch.randint(count, (count,), generator=self.generator)
            row += torch.bincount(drawn, minlength=count)
        return weights

    def of_replicates(self, replicates: Tensor, what: str) -> Interval:
        """Percentiles of the statistic's ``replicates`` [B]; ``what`` was resampled."""
        tail = (1 - LEVEL) / 2
        ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
        low, high = torch.quantile(replicates.double().cpu(), ends).tolist()
        return Interval(low, high, LEVEL, f"bootstrap of {self.draws} over {what}")

    def of_mean(self, values: Tensor, what: str = "samples") -> Interval:
        """Interval of the mean of ``values`` [N]; raises ``ValueError`` for no values."""
        if not len(values):
            raise ValueError("an interval of a mean needs at least one value, got none")
        exact = values.double().cpu()
        means = []
        for done in range(0, self.draws, DRAWS_AT_ONCE):
            weights = self.weights(len(exact), min(DRAWS_AT_ONCE, self.draws - done))
            means.append(weights @ exact / len(exact))
        return self.of_replicates(torch.cat(means), what)


def frechet_interval(made: FeatureSet, reference: Gaussian, generator: torch.Generator) -> Interval:
    """Interval of ``frechet_distance(made, reference)`` leaving out each of GROUPS groups.

    Variance (G-1)/G Σ (θ_g - θ̄)² (Efron and Stein 1981), with Student's quantile, for a fixed
    reference. Costs a distance a group and one pass.
    """
    if len(made) < 2 * GROUPS:
        raise ValueError(f"an interval needs at least {2 * GROUPS} samples, got {len(made)}")
    statistics = FeatureStatistics.of(made)
    values = []
    for rows in torch.randperm(len(made), generator=generator).chunk(GROUPS):
        group = FeatureStatistics.of(made.values[rows.to(made.values.device)])
        count = statistics.count - group.count
        total = statistics.total - group.total
        kept = FeatureStatistics(count, total, statistics.outer - group.outer, statistics.protocol)
        values.append(frechet_distance(kept, reference).value)
    spread = float(torch.tensor(values, dtype=torch.float64).std(correction=1))
    reach = student_quantile(len(values) - 1) * spread * (len(values) - 1) / len(values) ** 0.5
    centre = frechet_distance(statistics, reference).value
    method = f"jackknife of {len(values)} groups, reference fixed"
    return Interval(centre - reach, centre + reach, LEVEL, method)


def student_quantile(freedom: int) -> float:
    """The two-sided quantile of Student's t (Abramowitz and Stegun 26.7.5, around the normal's)."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
