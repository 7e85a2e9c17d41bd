"""Kernel distance between two sets of features (KID when they are Inception's; Bińkowski et al. 2018, sec. 4).

The unbiased squared maximum mean discrepancy with the cubic kernel k(a, b) = (gamma a·b + coef)³, gamma = 1/F: over
random subsets (mean and spread, the customary figure) and over the whole sets (the steadier one). One pass over the
kernel matrix in row blocks serves both, so that memory does not grow with N².

Shapes: features x [N, F], y [M, F]; membership ``wx`` [S, N], ``wy`` [S, M] of S subsets, 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol, same_width

BLOCK = 1024  # rows of the kernel matrix held at a time


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
    """Squared MMD: ``mean`` and ``std`` over subsets, ``full`` over whole sets (None if not asked for)."""

    mean: float
    std: float
    full: float | None
    protocol: Protocol


def kernel_distance(
    first: FeatureSet | Tensor | np.ndarray,
    second: FeatureSet | Tensor | np.ndarray,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
    full: bool = True,
    kernel: PolynomialKernel | None = None,
    progress: bool = False,
) -> KernelResult:
    """Unbiased squared MMD between features [N, F] and [M, F], in float64.

    Subsets of ``subset_size`` (at most the smaller set) are drawn without replacement from a generator seeded with
    ``seed``; ``std`` is their population standard deviation. ``full=False`` skips the whole-set estimate, whose cost
    is (N + M)² F: quicker above roughly 10,000 samples. Raises ``ValueError`` for NaN features, fewer than two
    samples, different widths or protocols, or a subset of fewer than two.
    """
    one, two = as_features(first), as_features(second)
    same_width(one.values.shape[1], two.values.shape[1])
    smaller = min(len(one), len(two))
    if smaller < 2:
        raise ValueError(f"a kernel distance needs at least 2 samples a set, got {smaller}; add more pictures")
    size = min(subset_size, smaller)
    if size < 2 or subsets < 1:
        raise ValueError(f"subsets must be >= 1 of size >= 2, got {subsets} of {size}; raise them")
    kernel = kernel or PolynomialKernel()
    x, y = one.values.double(), two.values.double().to(one.values.device)
    picks = _picks(len(x), len(y), subsets, size, seed)
    values, whole = (_in_one_pass if full else _subset_by_subset)(x, y, picks, kernel, progress)
    protocol = joint_protocol(one.protocol, two.protocol)
    protocol |= {"counts": [len(x), len(y)], "kernel": repr(kernel), "subsets": subsets, "subset_size": size}
    protocol |= {"subset_seed": seed}
    return KernelResult(float(values.mean()), float(values.std(correction=0)), whole, protocol)


def mmd_squared(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel, bar: bool = False) -> Tensor:
    """Unbiased squared MMD [S] of the subsets of x [N, F] and y [M, F] marked by ``wx`` [S, N] and ``wy`` [S, M]."""
    n, m = wx.sum(1), wy.sum(1)
    with tqdm(total=2 * len(x) + len(y), desc="kernel", disable=not bar) as rows:
        xx = _weighted_sum(x, x, wx, wx, kernel, rows) - (wx.square() * kernel.diagonal(x)).sum(1)
        yy = _weighted_sum(y, y, wy, wy, kernel, rows) - (wy.square() * kernel.diagonal(y)).sum(1)
        xy = _weighted_sum(x, y, wx, wy, kernel, rows)
    return xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * xy / (n * m)


Picks = list[tuple[Tensor, Tensor]]  # rows of x and of y in each subset


def _picks(n: int, m: int, subsets: int, size: int, seed: int) -> Picks:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randperm(n, generator=generator)[:size], torch.randperm(m, generator=generator)[:size])
        for _ in range(subsets)
    ]


def _in_one_pass(x: Tensor, y: Tensor, picks: Picks, kernel: PolynomialKernel, bar: bool) -> tuple[Tensor, float]:
    """Squared MMD of every subset [S] and of the whole sets, from one pass over the kernel matrix."""
    wx, wy = x.new_zeros(len(picks) + 1, len(x)), x.new_zeros(len(picks) + 1, len(y))
    for s, (i, j) in enumerate(picks):
        wx[s, i.to(x.device)] = 1
        wy[s, j.to(x.device)] = 1
    wx[-1], wy[-1] = 1, 1
    values = mmd_squared(x, y, wx, wy, kernel, bar)
    return values[:-1], float(values[-1])


def _subset_by_subset(x: Tensor, y: Tensor, picks: Picks, kernel: PolynomialKernel, bar: bool) -> tuple[Tensor, None]:
    """Squared MMD of every subset [S], each from its own small kernel matrix."""
    ones = x.new_ones(1, len(picks[0][0]))
    bars = tqdm(picks, desc="kernel", disable=not bar)
    return torch.cat([mmd_squared(x[i.to(x.device)], y[j.to(x.device)], ones, ones, kernel) for i, j in bars]), None


def _weighted_sum(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel, bar: tqdm) -> Tensor:
    """Sum over i, j of wx[s, i] k(x_i, y_j) wy[s, j]: [S]."""
    total = x.new_zeros(len(wx))
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        total += ((wx[:, rows] @ kernel(x[rows], y)) * wy).sum(1)
        bar.update(len(x[rows]))
    return total
