"""Kernel distance between two sets of features (KID when they are Inception's; Bińkowski et al.
2018, sec. 4).

The unbiased squared maximum mean discrepancy with the cubic kernel k(a, b) = (gamma a·b + coef)³,
gamma = 1/F: over random subsets (mean and spread, the customary figure) and over the whole sets
(the steadier one). One pass over the kernel matrix in row blocks serves both, so that memory does
not grow with N².

Shapes: features x [N, F], y [M, F]; weights ``wx`` [S, N], ``wy`` [S, M] of S weighted sets (0 or
1: subsets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol, same_width
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Interval, Measurement

BLOCK = 1024  # rows of the kernel matrix held at a time
Picks = Sequence[tuple[Tensor, Tensor]]  # rows of x and of y in each subset


@dataclass(frozen=True)
class PolynomialKernel:
    """k(a, b) = (gamma a·b + coef)^degree; ``gamma`` None is 1 / F."""

    degree: int = 3
    gamma: float | None = None
    coef: float = 1.0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Kernel matrix [N, M] of x [N, F] and y [M, F]."""
        gamma = 1 / x.shape[1] if self.gamma is None else self.gamma
        return (x @ y.T).mul_(gamma).add_(self.coef).pow_(self.degree)

    def diagonal(self, x: Tensor) -> Tensor:
        """k(a, a) of every row of x [N, F]: [N]."""
        gamma = 1 / x.shape[1] if self.gamma is None else self.gamma
        return x.square().sum(1).mul_(gamma).add_(self.coef).pow_(self.degree)


@dataclass
class KernelResult:
    """Squared MMD: ``mean`` and ``std`` over subsets, ``full`` over whole sets (None if not asked
    for).
    """

    mean: float
    std: float
    full: float | None
    protocol: Protocol
    interval: Interval | None = None  # of ``full``

    def measurement(self) -> Measurement:
        """The whole-set estimate, or the mean over subsets without it; ``protocol["estimate"]``
        says which.
        """
        parts = {"subsets_mean": self.mean, "subsets_std": self.std}
        value, estimate = (
            (self.mean, "mean over subsets") if self.full is None else (self.full, "whole sets")
        )
        return Measurement(
            "kid", value, {**self.protocol, "estimate": estimate}, parts, self.interval
        )


def kernel_distance(
    first: FeatureSet | Tensor | np.ndarray,
    second: FeatureSet | Tensor | np.ndarray,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
    picks: Picks | None = None,
    full: bool = True,
    bootstrap: Bootstrap | None = None,
    kernel: PolynomialKernel | None = None,
    progress: bool = False,
) -> KernelResult:
    """Unbiased squared MMD between features [N, F] and [M, F], in float64.

    Subsets of ``subset_size`` (at most the smaller set) are drawn without replacement from a
    generator seeded with ``seed``, or handed in as ``picks`` (pairs of row indices of equal length,
    to repeat another library's draw); ``std`` is their population standard deviation.
    ``full=False`` skips the whole-set estimate, whose cost is (N + M)² F: quicker above roughly
    10,000 samples. ``bootstrap`` gives that estimate an interval. Raises ``ValueError`` for NaN
    features, fewer than two samples, different widths or protocols, a subset of fewer than two, or
    an interval without the whole-set estimate.
    """
    one, two = as_features(first), as_features(second)
    kernel = kernel or PolynomialKernel()
    x, y = common_values(one, two)
    if bootstrap and not full:
        raise ValueError(
            "bootstrap belongs to the whole-set estimate, got full=False; set full=True or drop it"
        )
    protocol = joint_protocol(one.protocol, two.protocol)
    protocol |= {"counts": [len(x), len(y)], "kernel": repr(kernel)}
    chosen = (
        _picks(len(x), len(y), subsets, min(subset_size, len(x), len(y)), seed)
        if picks is None
        else picks
    )
    size = min((len(rows) for pair in chosen for rows in pair), default=0)
    if size < 2:
        raise ValueError(
            f"subsets must be >= 1 of size >= 2, got {len(chosen)} of {size}; raise them"
        )
    protocol |= {
        "subsets": len(chosen),
        "subset_size": size,
        "subset_seed": seed if picks is None else "given",
    }
    if not full:
        values = _subset_by_subset(x, y, chosen, kernel, progress)
        return KernelResult(float(values.mean()), float(values.std(correction=0)), None, protocol)
    values = _in_one_pass(x, y, chosen, bootstrap, kernel, progress)
    mean, std = float(values[: len(chosen)].mean()), float(values[: len(chosen)].std(correction=0))
    interval = (
        bootstrap.of_replicates(values[len(chosen) + 1 :], "both sets") if bootstrap else None
    )
    return KernelResult(mean, std, float(values[len(chosen)]), protocol, interval)


def common_values(one: FeatureSet, two: FeatureSet) -> tuple[Tensor, Tensor]:
    """Both sets' features in float64 on the first one's device; raises ``ValueError`` unless they
    can be compared.
    """
    same_width(one.values.shape[1], two.values.shape[1])
    smaller = min(len(one), len(two))
    if smaller < 2:
        raise ValueError(
            f"a kernel distance needs at least 2 samples a set, got {smaller}; add more pictures"
        )
    return one.values.double(), two.values.double().to(one.values.device)


def mmd_squared(
    x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel, bar: bool = False
) -> Tensor:
    """Unbiased squared MMD [S] of x [N, F] under weights ``wx`` [S, N] and y [M, F] under ``wy``
    [S, M].
    """
    with tqdm(total=2 * len(x) + len(y), desc="kernel", disable=not bar) as rows:
        within = mean_within(x, wx, kernel, rows) + mean_within(y, wy, kernel, rows)
        return within - 2 * mean_across(x, y, wx, wy, kernel, rows)


def mean_within(x: Tensor, wx: Tensor, kernel: PolynomialKernel, bar: tqdm) -> Tensor:
    """Weighted mean [S] of k(x_i, x_j) over i != j: what a U-statistic is made of."""
    squares = wx.square()
    off_diagonal = _weighted_sum(x, x, wx, wx, kernel, bar) - (squares * kernel.diagonal(x)).sum(1)
    return off_diagonal / (wx.sum(1).square() - squares.sum(1))


def mean_across(
    x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel, bar: tqdm
) -> Tensor:
    """Weighted mean [S] of k(x_i, y_j) over all i and j."""
    return _weighted_sum(x, y, wx, wy, kernel, bar) / (wx.sum(1) * wy.sum(1))


def _picks(n: int, m: int, subsets: int, size: int, seed: int) -> Picks:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randperm(n, generator=generator)[:size],
            torch.randperm(m, generator=generator)[:size],
        )
        for _ in range(subsets)
    ]


def _in_one_pass(
    x: Tensor,
    y: Tensor,
    picks: Picks,
    bootstrap: Bootstrap | None,
    kernel: PolynomialKernel,
    bar: bool,
) -> Tensor:
    """Squared MMD of every subset, then of the whole sets, then of every resample, from one pass
    over the kernel.
    """
    draws = bootstrap.draws if bootstrap else 0
    wx, wy = x.new_ones(len(picks) + 1 + draws, len(x)), x.new_ones(len(picks) + 1 + draws, len(y))
    wx[: len(picks)], wy[: len(picks)] = 0, 0
    for s, (i, j) in enumerate(picks):
        wx[s, i.to(x.device)] = 1
        wy[s, j.to(x.device)] = 1
    if bootstrap:
        wx[-draws:], wy[-draws:] = bootstrap.weights(len(x)).to(x), bootstrap.weights(len(y)).to(x)
    return mmd_squared(x, y, wx, wy, kernel, bar)


def _subset_by_subset(
    x: Tensor, y: Tensor, picks: Picks, kernel: PolynomialKernel, bar: bool
) -> Tensor:
    """Squared MMD of every subset [S], each from its own small kernel matrix."""
    bars = tqdm(picks, desc="kernel", disable=not bar)
    pairs = ((x[i.to(x.device)], y[j.to(x.device)]) for i, j in bars)
    return torch.cat(
        [mmd_squared(a, b, a.new_ones(1, len(a)), b.new_ones(1, len(b)), kernel) for a, b in pairs]
    )


def _weighted_sum(
    x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel, bar: tqdm
) -> Tensor:
    """Sum over i, j of wx[s, i] k(x_i, y_j) wy[s, j]: [S]."""
    total = x.new_zeros(len(wx))
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        total += ((wx[:, rows] @ kernel(x[rows], y)) * wy).sum(1)
        bar.update(len(x[rows]))
    return total
