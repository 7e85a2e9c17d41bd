"""Fréchet distance between two sets of features (FID when they are Inception's; Heusel et al. 2017, eq. 6).

Sufficient statistics are float64 and mergeable across batches, processes and files; memory does not grow with N.

Shapes: features [N, F]; ``total`` [F]; ``outer`` [F, F].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol, same_width


@dataclass
class FrechetResult:
    """The squared distance ``value`` (the number called FID), its two parts, and what was measured."""

    value: float
    mean_term: float  # ||mu_1 - mu_2||²
    covariance_term: float  # Tr(S_1 + S_2 - 2 (S_1 S_2)^½)
    protocol: Protocol


@dataclass
class FeatureStatistics:
    """Count, sum [F] and sum of outer products [F, F] of the features seen so far, in float64."""

    count: int
    total: Tensor
    outer: Tensor
    protocol: Protocol = field(default_factory=dict)

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> FeatureStatistics:
        """Statistics of no samples of ``width`` features."""
        total = torch.zeros(width, dtype=torch.float64, device=device)
        return cls(0, total, torch.zeros(width, width, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, features: FeatureSet | Tensor | np.ndarray) -> FeatureStatistics:
        """Statistics of one whole set [N, F]."""
        found = as_features(features)
        return cls.empty(found.values.shape[1], found.values.device).update(found)

    def update(self, features: FeatureSet | Tensor | np.ndarray) -> FeatureStatistics:
        """Add samples [N, F] in place; raises ``ValueError`` on NaN, another width or another protocol."""
        found = as_features(features)
        same_width(len(self.total), found.values.shape[1])
        self.protocol = joint_protocol(self.protocol, found.protocol)
        for rows in torch.split(found.values, 8192):
            exact = rows.to(self.total)
            self.count += len(exact)
            self.total += exact.sum(0)
            self.outer.addmm_(exact.T, exact)
        return self

    def merge(self, other: FeatureStatistics) -> FeatureStatistics:
        """Statistics of both sets together, as a new object."""
        same_width(len(self.total), len(other.total))
        protocol = joint_protocol(self.protocol, other.protocol)
        total, outer = self.total + other.total.to(self.total), self.outer + other.outer.to(self.outer)
        return FeatureStatistics(self.count + other.count, total, outer, protocol)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean [F] and unbiased covariance [F, F]; raises ``ValueError`` below two samples."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {self.count}; add more pictures")
        mean = self.total / self.count
        return mean, (self.outer - self.count * torch.outer(mean, mean)) / (self.count - 1)


def frechet_distance(
    first: FeatureStatistics | FeatureSet | Tensor | np.ndarray,
    second: FeatureStatistics | FeatureSet | Tensor | np.ndarray,
) -> FrechetResult:
    """Squared Fréchet distance between the Gaussians fitted to two sets (features [N, F] or their statistics).

    The estimate is biased upwards by small sets: compare only equal counts. With fewer samples than features it is
    still defined and ``protocol["note"]`` says so. Raises ``ValueError`` for NaN features, fewer than two samples,
    different widths or different protocols.
    """
    one, two = (x if isinstance(x, FeatureStatistics) else FeatureStatistics.of(x) for x in (first, second))
    same_width(len(one.total), len(two.total))
    protocol = {**joint_protocol(one.protocol, two.protocol), "counts": [one.count, two.count]}
    width = len(one.total)
    if min(one.count, two.count) <= width:
        protocol["note"] = f"covariance of rank < {width}: {min(one.count, two.count)} samples of {width} features"
    (mean_1, cov_1), (mean_2, cov_2) = one.moments(), two.moments()
    mean_term = float((mean_1 - mean_2.to(mean_1)).square().sum())
    small, large = (cov_1, cov_2) if one.count <= two.count else (cov_2, cov_1)
    root = _trace_of_root(small, large.to(small), rank=min(one.count, two.count) - 1)
    covariance_term = float(cov_1.trace() + cov_2.trace()) - 2 * root
    return FrechetResult(mean_term + covariance_term, mean_term, covariance_term, protocol)


def _trace_of_root(first: Tensor, second: Tensor, rank: int) -> float:
    """Tr (S_1 S_2)^½ as the sum of root eigenvalues of the symmetric product S_1^½ S_2 S_1^½.

    With S_1 = A Aᵀ the product AᵀS_2A has the same eigenvalues; A keeps only the ``rank`` directions S_1 can have, so
    that rounding in the empty ones, which the root would magnify, never enters.
    """
    values, vectors = torch.linalg.eigh(first)  # ascending
    keep = values > values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    keep[: max(len(values) - rank, 0)] = False
    factor = vectors[:, keep] * values[keep].sqrt()  # [F, r]
    if not factor.shape[1]:
        return 0.0
    return float(torch.linalg.eigvalsh(factor.T @ second @ factor).clamp(min=0).sqrt().sum())
