"""Kernel distance of two sets of features: KID where they are Inception's (Bińkowski et al. 2018).

The unbiased squared maximum mean discrepancy with the cubic kernel k(a, b) = (a·b / F + 1)³: over
random subsets (the customary figure) and over the whole sets (the steadier one), both in one pass
over the kernel matrix in row blocks.

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
KERNEL = "(a·b / F + 1)³"  # for protocols
Picks = Sequence[tuple[Tensor, Tensor]]  # rows of x and of y in each subset


def kernel(x: Tensor, y: Tensor) -> Tensor:
    """Kernel matrix [N, M] of x [N, F] and y [M, F]."""
    return _of_products(x @ y.T, x.shape[1])


def diagonal(x: Tensor) -> Tensor:
    """k(a, a) of every row of x [N, F]: [N]."""
    return _of_products(x.square().sum(1), x.shape[1])


def _of_products(products: Tensor, width: int) -> Tensor:
    return products.mul_(1 / width).add_(1).pow_(3)


@dataclass
class KernelResult:
    """Squared MMD: ``mean`` and ``std`` over subsets; ``full`` and its interval over whole sets."""

    mean: float
    std: float
    full: float | None
    protocol: Protocol
    interval: Interval | None = None

    def measurement(self) -> Measurement:
        """``full``, or ``mean`` if that was not measured; ``protocol["estimate"]`` says which."""
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
    full: bool = True,
    bootstrap: Bootstrap | None = None,
) -> KernelResult:
    """Unbiased squared MMD between features [N, F] and [M, F], in float64.

    Subsets of ``subset_size`` (at most the smaller set) are drawn without replacement; ``std`` is
    their population's. ``full=False`` skips the whole-set estimate, which costs (N + M)² F: faster
    above roughly 10,000 samples. ``bootstrap`` gives that estimate an interval.
    """
    x, y, protocol = exact_pair(first, second)
    if bootstrap and not full:
        raise ValueError("bootstrap belongs to the whole-set estimate, got full=False; drop one")
    size = min(subset_size, len(x), len(y))
    if subsets < 1 or size < 2:
        raise ValueError(f"subsets must be >= 1 of size >= 2, got {subsets} of {size}")
    picks = _picks(len(x), len(y), subsets, size, seed)
    protocol |= {"kernel": KERNEL, "subsets": subsets, "subset_size": size, "subset_seed": seed}
    values = _in_one_pass(x, y, picks, bootstrap) if full else _subset_by_subset(x, y, picks)
    of_subsets, rest = values.split([subsets, len(values) - subsets])
    interval = bootstrap.of_replicates(rest[1:], "both sets") if bootstrap else None
    std = float(of_subsets.std(correction=0))
    unsampled = float(rest[0]) if full else None
    return KernelResult(float(of_subsets.mean()), std, unsampled, protocol, interval)


def _picks(n: int, m: int, subsets: int, size: int, seed: int) -> Picks:
    permutation = partial(torch.randperm, generator=torch.Generator().manual_seed(seed))
    return [(permutation(n)[:size], permutation(m)[:size]) for _ in range(subsets)]


def exact_pair(first: Features, second: Features) -> tuple[Tensor, Tensor, Protocol]:
    """Both sets in float64 on the first one's device, and their protocol; two samples or more."""
    one, two, protocol = comparable(first, second)
    smaller = min(len(one), len(two))
    if smaller < 2:
        raise ValueError(f"a kernel distance needs at least 2 samples a set, got {smaller}")
    return one.values.double(), two.values.double().to(one.values.device), protocol


def mean_within(x: Tensor, wx: Tensor) -> Tensor:
    """Weighted mean [S] of k(x_i, x_j) over i != j, as in a U-statistic."""
    squares = wx.square()
    off_diagonal = _weighted_sum(x, x, wx, wx) - (squares * diagonal(x)).sum(1)
    return off_diagonal / (wx.sum(1).square() - squares.sum(1))


def mean_across(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor) -> Tensor:
    """Weighted mean [S] of k(x_i, y_j) over all i and j."""
    return _weighted_sum(x, y, wx, wy) / (wx.sum(1) * wy.sum(1))


def _weighted_sum(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor) -> Tensor:
    """Sum over i, j of wx[s, i] k(x_i, y_j) wy[s, j]: [S]."""
    total = x.new_zeros(len(wx))
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        total += ((wx[:, rows] @ kernel(x[rows], y)) * wy).sum(1)
    return total


def _mmd_squared(x: Tensor, y: Tensor, wx: Tensor, wy: Tensor) -> Tensor:
    return mean_within(x, wx) + mean_within(y, wy) - 2 * mean_across(x, y, wx, wy)


def _in_one_pass(x: Tensor, y: Tensor, picks: Picks, bootstrap: Bootstrap | None) -> Tensor:
    """Squared MMD of every subset, then of the whole sets, then of every resample."""
    weights = []
    for side, rows in enumerate((x, y)):
        of_subsets = rows.new_zeros(len(picks), len(rows))
        for subset, pick in zip(of_subsets, picks, strict=True):
            subset[pick[side].to(rows.device)] = 1
        groups = [of_subsets, rows.new_ones(1, len(rows))]
        if bootstrap:
            groups.append(bootstrap.weights(len(rows)).to(rows))
        weights.append(torch.cat(groups))
    return _mmd_squared(x, y, weights[0], weights[1])


def _subset_by_subset(x: Tensor, y: Tensor, picks: Picks) -> Tensor:
    """Squared MMD of every subset, one after the other."""
    estimates = []
    for i, j in picks:
        a = x[i.to(x.device)]
        b = y[j.to(y.device)]
        estimates.append(_mmd_squared(a, b, a.new_ones(1, len(a)), b.new_ones(1, len(b))))
    return torch.cat(estimates)
