"""Fréchet distance of two sets of features: FID (Heusel et al. 2017, eq. 6).

The sums are float64 and grow batch by batch; memory does not grow with N.

Shapes: features [N, F]; ``total`` [F]; ``outer`` [F, F].
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specmm.metrics.features import Features, Protocol, as_features, joint_protocol, same_width
from specmm.metrics.measurement import Measurement

ROWS = 512  # samples converted to float64 at a time
COLUMNS = 512  # features multiplied at a time: more use less of the symmetry, fewer are slow calls
WELL_CONDITIONED = 1e-9  # smallest squared Cholesky pivot, relative to the largest, that we trust


@typing.runtime_checkable
class Gaussian(typing.Protocol):
    """The moments of a set, its number of samples (None: unknown), and its protocol."""

    @property
    def count(self) -> int | None:
        """Number of samples; None if a file does not give it."""

    @property
    def protocol(self) -> Protocol:
        """The protocol of the measurement."""

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean [F] and covariance [F, F], float64; the caller may overwrite the covariance."""


@dataclass
class FeatureStatistics:
    """Count, sum [F] and sum of outer products [F, F] of the features seen so far, in float64."""

    count: int
    total: Tensor
    outer: Tensor  # symmetric: filled on and above the diagonal only, ``COLUMNS`` rows at a time
    protocol: Protocol = field(default_factory=dict)

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> FeatureStatistics:
        """Statistics of no samples of ``width`` features."""
        total = torch.zeros(width, dtype=torch.float64, device=device)
        return cls(0, total, torch.zeros(width, width, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, features: Features) -> FeatureStatistics:
        """Statistics of one whole set [N, F]."""
        rows = as_features(features)
        return cls.empty(rows.values.shape[1], rows.values.device).update(rows)

    def update(self, features: Features) -> FeatureStatistics:
        """Add samples [N, F] in place; ``ValueError`` on NaN, another width or protocol."""
        samples = as_features(features)
        same_width(len(self.total), samples.values.shape[1])
        self.protocol = joint_protocol(self.protocol, samples.protocol)
        for rows in torch.split(samples.values, ROWS):
            exact = rows.to(self.total)
            self.count += len(exact)
            self.total += exact.sum(0)
            for start in range(0, len(self.total), COLUMNS):
                block = slice(start, start + COLUMNS)
                self.outer[block, start:].addmm_(exact[:, block].T, exact[:, start:])
        return self

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean [F] and unbiased covariance [F, F]; raises ``ValueError`` below two samples."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {self.count}; add more")
        mean = self.total / self.count
        covariance = self.outer / (self.count - 1)
        for start in range(0, len(mean), COLUMNS):
            end = start + COLUMNS
            covariance[end:, start:end] = covariance[start:end, end:].T
        return mean, covariance.addr_(mean, mean, alpha=-self.count / (self.count - 1))


def frechet_distance(first: Gaussian | Features, second: Gaussian | Features) -> Measurement:
    """Squared Fréchet distance of the Gaussians fitted to two sets: features [N, F] or statistics.

    ``parts``: ``mean_term`` ||mu_1 - mu_2||² and ``covariance_term`` Tr(S_1 + S_2 - 2 (S_1 S_2)^½).
    Small sets bias the estimate upwards: compare only equal counts. With fewer samples than
    features it is still defined, and ``protocol["note"]`` says so. Raises ``ValueError`` for NaN,
    fewer than two samples, different widths or different protocols.
    """
    one, two = (x if isinstance(x, Gaussian) else FeatureStatistics.of(x) for x in (first, second))
    protocol = {**joint_protocol(one.protocol, two.protocol), "counts": [one.count, two.count]}
    if _rank_bound(one) > _rank_bound(two):  # the distance is symmetric; a smaller rank is safer
        one, two = two, one
    mean_1, covariance = one.moments()
    trace = float(covariance.trace())
    factor, triangular = _factor(covariance, _rank_bound(one))
    del covariance  # at 2048 features each matrix less is 34 MB less
    mean_2, covariance = two.moments()
    width = len(mean_1)
    same_width(width, len(mean_2))
    if _rank_bound(one) < width:
        few = f"{one.count} samples of {width} features"
        protocol["note"] = f"covariance of rank < {width}: {few}"
    mean_term = float((mean_1 - mean_2.to(mean_1)).square().sum())
    trace += float(covariance.trace())
    covariance = _symmetric_product(factor, covariance.to(mean_1), triangular)
    del factor
    covariance_term = trace - 2 * float(torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt().sum())
    parts = {"mean_term": mean_term, "covariance_term": covariance_term}
    return Measurement("fid", mean_term + covariance_term, protocol, parts)


def _rank_bound(gaussian: Gaussian) -> int:
    """The largest possible rank of the covariance; unbounded if the count is unknown."""
    return 2**62 if gaussian.count is None else gaussian.count - 1


def _factor(covariance: Tensor, rank: int) -> tuple[Tensor, bool]:
    """A [F, r] with A Aᵀ = ``covariance`` [F, F], and whether it is lower triangular.

    By Cholesky if that is safe, in a tenth of the time; otherwise from the eigenvectors of the
    directions that the covariance can have: in the others the root would magnify rounding.
    """
    if rank >= len(covariance):
        lower, failed = torch.linalg.cholesky_ex(covariance)
        pivots = lower.diagonal()
        if not failed and pivots.min() ** 2 > WELL_CONDITIONED * pivots.max() ** 2:
            return lower, True
    values, vectors = torch.linalg.eigh(covariance)  # ascending
    keep = values > values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    keep[: max(len(values) - rank, 0)] = False
    return vectors[:, keep] * values[keep].sqrt(), False


def _symmetric_product(a: Tensor, second: Tensor, triangular: bool) -> Tensor:
    """AᵀS_2A [r, r]; overwrites ``second``.

    If S_1 = A Aᵀ, the roots of the product's eigenvalues add up to Tr (S_1 S_2)^½. With A
    triangular, a block of rows, then of columns, needs only entries not yet overwritten.
    """
    if not triangular:
        return (a.T @ second) @ a
    for start in range(0, len(a), COLUMNS):
        block = slice(start, start + COLUMNS)
        second[block] = a[start:, block].T @ second[start:]
    for start in range(0, len(a), COLUMNS):
        block = slice(start, start + COLUMNS)
        second[:, block] = second[:, start:] @ a[start:, block]
    return second
