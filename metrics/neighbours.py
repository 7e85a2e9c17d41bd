"""Improved precision and recall (Kynkäänniemi et al. 2019, eq. 1-2): fidelity and variety.

Each sample of a set is the centre of a ball that reaches to its k-th nearest neighbour in the same
set; the balls together are the set's manifold. A point on a ball's surface is inside, as in the
authors' code, with an allowance for rounding. Distances are float64, in row blocks.

Shapes: real [N, F], made [M, F]; radii [N], squared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specmm.metrics.features import Features, Protocol, comparable
from specmm.metrics.intervals import Bootstrap
from specmm.metrics.measurement import Measurement

BLOCK = 1024  # rows of the distance matrix held at a time
ROUNDING = 1e-12  # of squared distances, relative to the largest squared norm


def precision_recall(
    real: Features, made: Features, *, k: int = 3, bootstrap: Bootstrap | None = None
) -> tuple[Measurement, Measurement]:
    """Shares of ``made`` [M, F] in the manifold of ``real`` [N, F] (precision), and vice versa.

    ``bootstrap`` gives intervals over the points, with fixed manifolds. Sets need more than k
    samples.
    """
    x, y, protocol = _centred(real, made, k)
    pair = []
    for name, points, centres in (("precision", y, x), ("recall", x, y)):
        inside = _inside(points, centres, _squared_radii(centres, k)).double()
        interval = bootstrap.of_mean(inside, "points, manifold fixed") if bootstrap else None
        pair.append(Measurement(name, float(inside.mean()), dict(protocol), interval=interval))
    return pair[0], pair[1]


def _squared_radii(x: Tensor, k: int) -> Tensor:
    """Squared distance [N] of each row of x [N, F] to its k-th nearest other row."""
    return torch.cat([near.topk(k + 1, largest=False).values[:, k] for near in _distances(x, x)])


def _inside(points: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    """Whether each of the points [M, F] lies in a ball [M]."""
    slack = ROUNDING * max(float(s.square().sum(1).max()) for s in (points, centres))
    return torch.cat([(near <= radii + slack).any(1) for near in _distances(points, centres)])


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
