"""Kernel distance of two sets of features: KID where they are Inception's (Bińkowski et al. 2018).

The unbiased squared maximum mean discrepancy with the cubic kernel k(a, b) = (gamma a·b + coef)³,
gamma = 1/F: over random subsets (the customary figure) and over the whole sets (the steadier one),
both in one pass over the kernel matrix in row blocks.

Shapes: features x [N, F], y [M, F]; weights ``wx`` [S, N], ``wy`` [S, M] (how often) of S sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specmm.metrics.features import Features, Protocol, comparable
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
        return self._of_products(x @ y.T, x.shape[1])

    def diagonal(self, x: Tensor) -> Tensor:
        """k(a, a) of every row of x [N, F]: [N]."""
        return self._of_products(x.square().sum(1), x.shape[1])

    def _of_products(self, products: Tensor, width: int) -> Tensor:
        gamma = 1 / width if self.gamma is None else self.gamma
        return products.mul_(gamma).add_(self.coef).pow_(self.degree)


@dataclass
class KernelResult:
    """Squared MMD: ``mean`` and ``std`` over subsets; ``full`` and its interval over whole sets."""

    mean: float
    std: float
    full: float | None
    protocol: Protocol
    interval: Interval | None = None

    def measurement(self) -> Measurement:
        """``full``, or ``mean`` where it was not measured; ``protocol["estimate"]`` says which."""
        parts = {"subsets_mean": self.mean, "subsets_std": self.std}
        estimate = "mean over subsets" if self.full is None else "whole sets"
        value = self.mean if self.full is None else self.full
        protocol = {**self.protocol, "estimate": estimate}
        return Measurement("kid", value, protocol, parts, self.interval)


def kernel_distance(
    first: Features,
    second: Features,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
    picks: Picks | None = None,
    full: bool = True,
    bootstrap: Bootstrap | None = None,
    kernel: PolynomialKernel | None = None,
) -> KernelResult:
    """Unbiased squared MMD between features [N, F] and [M, F], in float64.

    Subsets of ``subset_size`` (at most the smaller set) are drawn without replacement, or given as
    ``picks`` (pairs of row indices of equal length); ``std`` is their population's. ``full=False``
    skips the whole-set estimate, whose cost is (N + M)² F: quicker above roughly 10,000 samples.
    ``bootstrap`` gives that estimate an interval.
    """
    x, y, protocol = exact_pair(first, second)
    kernel = kernel or PolynomialKernel()
    if bootstrap and not full:
        raise ValueError("bootstrap belongs to the whole-set estimate, got full=False; drop one")
    chosen = picks or []
    if picks is None:
        size = min(subset_size, len(x), len(y))
        generator = torch.Generator().manual_seed(seed)
        some = partial(torch.randperm, generator=generator)
        chosen = [(some(len(x))[:size], some(len(y))[:size]) for _ in range(subsets)]
    size = min((len(rows) for pair in chosen for rows in pair), default=0)
    if size < 2:
        raise ValueError(f"subsets must be >= 1 of size >= 2, got {len(chosen)} of {size}")
    protocol |= {"kernel": repr(kernel), "subsets": len(chosen), "subset_size": size}
    protocol["subset_seed"] = seed if picks is None else "given"
    if full:
        values = _in_one_pass(x, y, chosen, bootstrap, kernel)
    else:
        values = _subset_by_subset(x, y, chosen, kernel)
    of_subsets, rest = values.split([len(chosen), len(values) - len(chosen)])
    interval = bootstrap.of_replicates(rest[1:], "both sets") if bootstrap else None
    std = float(of_subsets.std(correction=0))
    whole = float(rest[0]) if full else None
    return KernelResult(float(of_subsets.mean()), std, whole, protocol, interval)


def exact_pair(first: Features, second: Features) -> tuple[Tensor, Tensor, Protocol]:
    """Both sets in float64 on the first one's device, and their protocol; two samples or more."""
    one, two, protocol = comparable(first, second)
    smaller = min(len(one), len(two))
    if smaller < 2:
        raise ValueError(f"a kernel distance needs at least 2 samples a set, got {smaller}")
    return one.values.double(), two.values.double().to(one.values.device), protocol


def mean_within(x: Tensor, wx: Tensor, kernel: PolynomialKernel) -> Tensor:
    """Weighted mean [S] of k(x_i, x_j) over i != j, as in a U-statistic."""
    squares = wx.square()
    off_diagonal = _weighted_sum(x, x, wx, wx, kernel) - (squares * kernel.diagonal(x)).sum(1)
    return off_diagonal / (wx.sum(1).square() - squares.sum(1))


def mean_across(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel) -> Tensor:
    """Weighted mean [S] of k(x_i, y_j) over all i and j."""
    return _weighted_sum(x, y, wx, wy, kernel) / (wx.sum(1) * wy.sum(1))


def _weighted_sum(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel) -> Tensor:
    """Sum over i, j of wx[s, i] k(x_i, y_j) wy[s, j]: [S]."""
    total = x.new_zeros(len(wx))
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        total += ((wx[:, rows] @ kernel(x[rows], y)) * wy).sum(1)
    return total


def _mmd_squared(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor, kernel: PolynomialKernel) -> Tensor:
    within = mean_within(x, wx, kernel) + mean_within(y, wy, kernel)
    return within - 2 * mean_across(x, y, wx, wy, kernel)


def _in_one_pass(
    x: Tensor, y: Tensor, picks: Picks, bootstrap: Bootstrap | None, kernel: PolynomialKernel
) -> Tensor:
    """Squared MMD of every subset, then of the whole sets, then of every resample."""
    weights = []
    for side, rows in enumerate((x, y)):
        of_subsets = rows.new_zeros(len(picks), len(rows))
        for subset, pick in zip(of_subsets, picks, strict=True):
            subset[pick[side].to(rows.device)] = 1
        found = [of_subsets, rows.new_ones(1, len(rows))]
        if bootstrap:
            found.append(bootstrap.weights(len(rows)).to(rows))
        weights.append(torch.cat(found))
    return _mmd_squared(x, y, weights[0], weights[1], kernel)


def _subset_by_subset(x: Tensor, y: Tensor, picks: Picks, kernel: PolynomialKernel) -> Tensor:
    found = []
    for i, j in picks:
        a = x[i.to(x.device)]
        b = y[j.to(y.device)]
        found.append(_mmd_squared(a, b, a.new_ones(1, len(a)), b.new_ones(1, len(b)), kernel))
    return torch.cat(found)
