"""Fréchet distance between two sets of features (FID when they are Inception's; Heusel et al. 2017,
eq. 6).

Sufficient statistics are float64 and mergeable across batches, processes and files; memory does not
grow with N.

Shapes: features [N, F]; ``total`` [F]; ``outer`` [F, F].
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol, same_width
from specmm.metrics.measurement import Measurement

ROWS = 512  # samples converted to float64 at a time
# features whose products are taken at a time: more use less of the symmetry, fewer are slow calls
COLUMNS = 512
WELL_CONDITIONED = 1e-9  # smallest squared Cholesky pivot, relative to the largest, that we trust


@typing.runtime_checkable
class Gaussian(typing.Protocol):
    """What a Fréchet distance needs to know of a set: moments, how many samples made them (None:
    unknown), protocol.
    """

    @property
    def count(self) -> int | None:
        """Number of samples, None where a file does not tell."""
        ...

    @property
    def protocol(self) -> Protocol:
        """What was measured."""
        ...

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean [F] and covariance [F, F], float64; the caller may overwrite the covariance."""
        ...


Sample = Gaussian | FeatureSet | Tensor | np.ndarray


@dataclass
class FeatureStatistics:
    """Count, sum [F] and sum of outer products [F, F] of the features seen so far, in float64.

    ``outer`` is symmetric, so it is filled on and above the diagonal only, ``COLUMNS`` rows at a
    time.
    """

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
        """Add samples [N, F] in place; raises ``ValueError`` on NaN, another width or another
        protocol.
        """
        found = as_features(features)
        same_width(len(self.total), found.values.shape[1])
        self.protocol = joint_protocol(self.protocol, found.protocol)
        for rows in torch.split(found.values, ROWS):
            exact = rows.to(self.total)
            self.count += len(exact)
            self.total += exact.sum(0)
            _add_products(self.outer, exact)
        return self

    def merge(self, other: FeatureStatistics) -> FeatureStatistics:
        """Statistics of both sets together, as a new object."""
        same_width(len(self.total), len(other.total))
        protocol = joint_protocol(self.protocol, other.protocol)
        total, outer = (
            self.total + other.total.to(self.total),
            self.outer + other.outer.to(self.outer),
        )
        return FeatureStatistics(self.count + other.count, total, outer, protocol)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean [F] and unbiased covariance [F, F]; raises ``ValueError`` below two samples."""
        if self.count < 2:
            raise ValueError(
                f"a covariance needs at least 2 samples, got {self.count}; add more pictures"
            )
        mean = self.total / self.count
        covariance = self.outer / (self.count - 1)
        for start in range(0, len(mean), COLUMNS):
            end = start + COLUMNS
            covariance[end:, start:end] = covariance[start:end, end:].T
        return mean, covariance.addr_(mean, mean, alpha=-self.count / (self.count - 1))


def _add_products(outer: Tensor, rows: Tensor) -> None:
    """``outer`` [F, F] += rowsᵀ rows, on and above the diagonal."""
    for start in range(0, len(outer), COLUMNS):
        block = slice(start, start + COLUMNS)
        outer[block, start:].addmm_(rows[:, block].T, rows[:, start:])


def frechet_distance(first: Sample, second: Sample) -> Measurement:
    """Squared Fréchet distance between the Gaussians fitted to two sets (features [N, F] or their
    statistics).

    ``parts``: ``mean_term`` ||mu_1 - mu_2||² and ``covariance_term`` Tr(S_1 + S_2 - 2 (S_1 S_2)^½).
    The estimate is biased upwards by small sets: compare only equal counts. With fewer samples than
    features it is still defined and ``protocol["note"]`` says so. Raises ``ValueError`` for NaN
    features, fewer than two samples, different widths or different protocols.
    """
    one, two = (x if isinstance(x, Gaussian) else FeatureStatistics.of(x) for x in (first, second))
    protocol = {**joint_protocol(one.protocol, two.protocol), "counts": [one.count, two.count]}
    if _known(one) > _known(
        two
    ):  # the trace of the root does not care which comes first; the smaller rank is safer
        one, two = two, one
    mean_1, covariance = one.moments()
    trace, factor = float(covariance.trace()), _factor(covariance, rank=_known(one) - 1)
    del covariance  # at 2048 features each matrix less is 34 MB less
    mean_2, covariance = two.moments()
    same_width(len(mean_1), len(mean_2))
    if _known(one) <= len(mean_1):
        protocol["note"] = (
            f"covariance of rank < {len(mean_1)}: {one.count} samples of {len(mean_1)} features"
        )
    mean_term = float((mean_1 - mean_2.to(mean_1)).square().sum())
    trace += float(covariance.trace())
    covariance = _symmetric_product(factor, covariance.to(mean_1))
    del factor
    covariance_term = trace - 2 * float(torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt().sum())
    parts = {"mean_term": mean_term, "covariance_term": covariance_term}
    return Measurement("fid", mean_term + covariance_term, protocol, parts)


def _known(found: Gaussian) -> int:
    """The count that bounds the rank; a file that does not tell bounds nothing."""
    return 2**62 if found.count is None else found.count


@dataclass(frozen=True)
class _Factor:
    """A [F, r] with A Aᵀ = S; ``triangular``: square, with nothing above the diagonal."""

    values: Tensor
    triangular: bool


def _symmetric_product(factor: _Factor, second: Tensor) -> Tensor:
    """AᵀS_2A [r, r]: where S_1 = A Aᵀ, the roots of its eigenvalues add up to Tr (S_1 S_2)^½.
    Overwrites ``second``.

    With A triangular, a block of rows (then of columns) of the product needs only those not yet
    overwritten.
    """
    a = factor.values
    if not factor.triangular:
        return (a.T @ second) @ a
    for start in range(0, len(a), COLUMNS):
        block = slice(start, start + COLUMNS)
        second[block] = a[start:, block].T @ second[start:]
    for start in range(0, len(a), COLUMNS):
        block = slice(start, start + COLUMNS)
        second[:, block] = second[:, start:] @ a[start:, block]
    return second


def _factor(covariance: Tensor, rank: int) -> _Factor:
    """Of ``covariance`` [F, F], which can have ``rank`` at most.

    Cholesky's where that is safe, which takes a tenth of the time; else from the eigenvectors,
    keeping only the directions the covariance can have, so that rounding in the empty ones, which
    the root would magnify, never enters.
    """
    if rank >= len(covariance):
        lower, failed = torch.linalg.cholesky_ex(covariance)
        pivots = lower.diagonal()
        if not failed and pivots.min() ** 2 > WELL_CONDITIONED * pivots.max() ** 2:
            return _Factor(lower, triangular=True)
    values, vectors = torch.linalg.eigh(covariance)  # ascending
    keep = values > values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    keep[: max(len(values) - rank, 0)] = False
    return _Factor(vectors[:, keep] * values[keep].sqrt(), triangular=False)
