"""How much of what was made is real, and how much of what is real was made: four figures from
nearest neighbours.

Improved precision and recall (Kynkäänniemi et al. 2019, eq. 1-2) and density and coverage (Naeem et
al. 2020, eq. 3-4). Each sample of a set is the centre of a ball that reaches to its k-th nearest
neighbour in the same set; the balls together are the set's manifold. Distances are float64 and
taken in row blocks, so that memory does not grow with N². A point on a ball's surface is inside for
precision and recall and outside for density and coverage, as in the authors' code; "on the surface"
allows for rounding.

Shapes: real [N, F], made [M, F]; radii [N], squared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol, same_width
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Measurement

BLOCK = 1024  # rows of the distance matrix held at a time
ROUNDING = 1e-12  # of squared distances, relative to the largest squared norm


def precision_recall(
    real: FeatureSet | Tensor | np.ndarray,
    made: FeatureSet | Tensor | np.ndarray,
    *,
    k: int = 3,
    bootstrap: Bootstrap | None = None,
) -> tuple[Measurement, Measurement]:
    """Precision (share of ``made`` [M, F] in the manifold of ``real`` [N, F]) and recall (the other
    way round).

    ``bootstrap`` gives intervals over the points, the manifolds held fixed. Raises ``ValueError``
    for NaN features, different widths or protocols, or sets of k samples or fewer.
    """
    x, y, protocol = _prepared(real, made, k)
    found = []
    for name, points, centres in (("precision", y, x), ("recall", x, y)):
        radii = squared_radii(centres, k)
        inside = torch.cat(
            [block.any(1) for block in memberships(points, centres, radii, closed=True)]
        ).double()
        interval = bootstrap.of_mean(inside, "points, manifold fixed") if bootstrap else None
        found.append(Measurement(name, float(inside.mean()), dict(protocol), interval=interval))
    return found[0], found[1]


def density_coverage(
    real: FeatureSet | Tensor | np.ndarray,
    made: FeatureSet | Tensor | np.ndarray,
    *,
    k: int = 5,
    bootstrap: Bootstrap | None = None,
) -> tuple[Measurement, Measurement]:
    """Density (real balls a made sample lies in, over k) and coverage (share of real balls with a
    made sample in them).

    ``bootstrap`` gives density an interval over the made samples, and coverage one over the real
    ones, the balls held fixed. Raises ``ValueError`` for NaN features, different widths or
    protocols, or sets of k samples or fewer.
    """
    x, y, protocol = _prepared(real, made, k)
    radii = squared_radii(x, k)
    depth, covered = [], torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for block in memberships(y, x, radii, closed=False):
        depth.append(block.sum(1).double() / k)
        covered |= block.any(0)
    density = Measurement("density", float(torch.cat(depth).mean()), dict(protocol))
    coverage = Measurement("coverage", float(covered.double().mean()), dict(protocol))
    if bootstrap:
        density = replace(
            density, interval=bootstrap.of_mean(torch.cat(depth), "made samples, balls fixed")
        )
        coverage = replace(
            coverage, interval=bootstrap.of_mean(covered, "real samples, balls fixed")
        )
    return density, coverage


def squared_radii(x: Tensor, k: int) -> Tensor:
    """Squared distance [N] of each row of x [N, F] to its k-th nearest other row."""
    return torch.cat([near.topk(k + 1, largest=False).values[:, k] for near in _distances(x, x)])


def memberships(
    points: Tensor, centres: Tensor, radii: Tensor, *, closed: bool
) -> Iterator[Tensor]:
    """Whether each point lies in each ball, in blocks [b, N] of the points [M, F]."""
    slack = ROUNDING * max(float(s.square().sum(1).max()) for s in (points, centres))
    for near in _distances(points, centres):
        yield near <= radii + slack if closed else near < radii - slack


def _distances(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Squared distances of x [N, F] to y [M, F], in blocks [b, M]."""
    norms = y.square().sum(1)
    for rows in x.split(BLOCK):
        yield (
            torch.addmm(norms, rows, y.T, alpha=-2)
            .add_(rows.square().sum(1, keepdim=True))
            .clamp_(min=0)
        )


def _prepared(
    real: FeatureSet | Tensor | np.ndarray, made: FeatureSet | Tensor | np.ndarray, k: int
) -> tuple[Tensor, Tensor, Protocol]:
    """Both sets in float64 around the real mean (distances stay, rounding shrinks), and the
    protocol.
    """
    one, two = as_features(real), as_features(made)
    same_width(one.values.shape[1], two.values.shape[1])
    smaller = min(len(one), len(two))
    if not 1 <= k < smaller:
        raise ValueError(
            f"k must be at least 1 and less than the samples of either set, got {k} of {smaller}"
        )
    protocol = {
        **joint_protocol(one.protocol, two.protocol),
        "counts": [len(one), len(two)],
        "k": k,
    }
    x = one.values.double()
    centre = x.mean(0)
    return x - centre, two.values.to(x) - centre, protocol
