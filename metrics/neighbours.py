"""Metrics by nearest neighbours in feature space: fidelity, variety and memorisation.

Improved precision and recall (Kynkäänniemi et al. 2019, eq. 1-2) and density and coverage (Naeem et
al. 2020, eq. 3-4). Each sample of a set is the centre of a ball that reaches to its k-th nearest
neighbour in the same set; the balls together are the set's manifold. A point on a ball's surface
is inside for precision and recall and outside for density and coverage, as in the authors' code,
with an allowance for rounding. Distances are float64, in row blocks.

Shapes: real [N, F], made [M, F]; radii [N], squared; pictures [N, R, R, 3] uint8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import Features, FeatureSet, Protocol, comparable
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Measurement

BLOCK = 1024  # rows of the distance matrix held at a time
ROUNDING = 1e-12  # of squared distances, relative to the largest squared norm
CANDIDATES = 8  # neighbours by the fast float32 formula, ranked again exactly


def precision_recall(
    real: Features, made: Features, *, k: int = 3, bootstrap: Bootstrap | None = None
) -> tuple[Measurement, Measurement]:
    """Shares of ``made`` [M, F] in the manifold of ``real`` [N, F] (precision), and vice versa.

    ``bootstrap`` gives intervals over the points, the manifolds held fixed. Sets need more than k.
    """
    x, y, protocol = _centred(real, made, k)
    found = []
    for name, points, centres in (("precision", y, x), ("recall", x, y)):
        radii = _squared_radii(centres, k)
        blocks = [block.any(1) for block in _memberships(points, centres, radii, closed=True)]
        inside = torch.cat(blocks).double()
        interval = bootstrap.of_mean(inside, "points, manifold fixed") if bootstrap else None
        found.append(Measurement(name, float(inside.mean()), dict(protocol), interval=interval))
    return found[0], found[1]


def density_coverage(
    real: Features, made: Features, *, k: int = 5, bootstrap: Bootstrap | None = None
) -> tuple[Measurement, Measurement]:
    """Density (real balls a made sample lies in, over k), coverage (share of real balls not empty).

    ``bootstrap`` gives density an interval over the made samples, coverage one over the real ones.
    """
    x, y, protocol = _centred(real, made, k)
    radii = _squared_radii(x, k)
    blocks = []
    covered = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for block in _memberships(y, x, radii, closed=False):
        blocks.append(block.sum(1).double() / k)
        covered |= block.any(0)
    depth = torch.cat(blocks)
    density = Measurement("density", float(depth.mean()), dict(protocol))
    coverage = Measurement("coverage", float(covered.double().mean()), dict(protocol))
    if bootstrap:
        of_made = bootstrap.of_mean(depth, "made samples, balls fixed")
        of_real = bootstrap.of_mean(covered, "real samples, balls fixed")
        return replace(density, interval=of_made), replace(coverage, interval=of_real)
    return density, coverage


def _squared_radii(x: Tensor, k: int) -> Tensor:
    """Squared distance [N] of each row of x [N, F] to its k-th nearest other row."""
    return torch.cat([near.topk(k + 1, largest=False).values[:, k] for near in _distances(x, x)])


def _memberships(points: Tensor, centres: Tensor, radii: Tensor, closed: bool) -> Iterator[Tensor]:
    """Whether each point lies in each ball, in blocks [b, N] of the points [M, F]."""
    slack = ROUNDING * max(float(s.square().sum(1).max()) for s in (points, centres))
    for near in _distances(points, centres):
        yield near <= radii + slack if closed else near < radii - slack


def _distances(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Squared distances of x [N, F] to y [M, F], in blocks [b, M]."""
    norms = y.square().sum(1)
    for rows in x.split(BLOCK):
        products = torch.addmm(norms, rows, y.T, alpha=-2)
        yield products.add_(rows.square().sum(1, keepdim=True)).clamp_(min=0)


def _centred(real: Features, made: Features, k: int) -> tuple[Tensor, Tensor, Protocol]:
    """Both sets in float64 around the real mean (distances stay, rounding shrinks)."""
    one, two, protocol = comparable(real, made)
    smaller = min(len(one), len(two))
    if not 1 <= k < smaller:
        got = f"{k} of {smaller}"
        raise ValueError(f"k must be at least 1 and less than the samples of either set, got {got}")
    x = one.values.double()
    centre = x.mean(0)
    return x - centre, two.values.to(x) - centre, {**protocol, "k": k}


@dataclass
class Neighbours:
    """Each sample's distance [N] float64 to its nearest reference, and the reference's index."""

    distances: Tensor
    indices: Tensor
    protocol: Protocol


def pixels(pictures: np.ndarray | Tensor) -> FeatureSet:
    """Pictures [N, R, R, 3] uint8 as features [N, 3R²] whose distances are root mean squares."""
    values = torch.as_tensor(pictures)
    if values.dtype != torch.uint8 or values.ndim != 4:
        got = f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"pictures must be uint8 [N, R, R, 3], got {got}")
    flat = values.flatten(1).float()
    size = f"none, {values.shape[1]}x{values.shape[2]}"
    return FeatureSet(flat / (255 * flat.shape[1] ** 0.5), {"features": "pixels", "resize": size})


def nearest_neighbours(samples: Features, references: Features) -> Neighbours:
    """The nearest of ``references`` [M, F] to each of ``samples`` [N, F]; a copy is at distance 0.

    Candidates come from a float32 product, their distances from the differences in float64.
    """
    one, two, protocol = comparable(samples, references)
    if not len(two):
        raise ValueError("references must hold at least one sample, got none")
    centre = two.values.float().mean(0)  # distances do not change, rounding shrinks
    known = two.values.float() - centre
    norms = known.square().sum(1)
    distances = []
    indices = []
    for block in one.values.to(known.device).split(BLOCK):
        rows = block.float() - centre
        near = torch.addmm(norms, rows, known.T, alpha=-2)  # squared distance less |row|²: [n, M]
        candidates = near.topk(min(CANDIDATES, len(known)), largest=False).indices  # [n, C]
        exact = torch.stack([(rows - known[c]).double().square().sum(1) for c in candidates.T], 1)
        best = exact.argmin(1, keepdim=True)
        distances.append(exact.gather(1, best).squeeze(1).sqrt())
        indices.append(candidates.gather(1, best).squeeze(1))
    return Neighbours(torch.cat(distances), torch.cat(indices), protocol)
