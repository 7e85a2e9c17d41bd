"""Nearest training neighbours of samples, in feature or pixel space, so that memorising shows.

Shapes: samples [N, F], references [M, F]; pictures [N, R, R, 3] uint8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import FeatureSet, Protocol, as_features, joint_protocol, same_width

BLOCK = 1024  # samples at a time
CANDIDATES = 8  # neighbours by the fast float32 formula, ranked again exactly


@dataclass
class Neighbours:
    """Euclidean ``distances`` [N] float64 to, and ``indices`` [N] of, the nearest reference of each
    sample.
    """

    distances: Tensor
    indices: Tensor
    protocol: Protocol


def pixels(pictures: np.ndarray | Tensor) -> FeatureSet:
    """Pictures [N, R, R, 3] uint8 as features [N, 3R²].

    Scaled so that a distance is the root-mean-square difference of channel values in [0, 1]. Raises
    ``ValueError`` for another type or rank.
    """
    values = torch.as_tensor(pictures)
    if values.dtype != torch.uint8 or values.ndim != 4:
        got = f"{values.dtype} {list(values.shape)}"
        raise ValueError(
            f"pictures must be uint8 [N, R, R, 3], got {got}; scale to 0..255 and stack them"
        )
    flat = values.flatten(1).float()
    protocol: Protocol = {
        "features": "pixels",
        "resize": f"none, {values.shape[1]}x{values.shape[2]}",
    }
    return FeatureSet(flat / (255 * flat.shape[1] ** 0.5), protocol)


def nearest_neighbours(
    samples: FeatureSet | Tensor | np.ndarray, references: FeatureSet | Tensor | np.ndarray
) -> Neighbours:
    """The nearest of ``references`` [M, F] to each of ``samples`` [N, F].

    Candidates come from a float32 matrix product; their distances are then computed from the
    differences in float64, so that an exact copy is at distance 0. Raises ``ValueError`` for NaN,
    different widths or protocols, or no reference.
    """
    one, two = as_features(samples), as_features(references)
    same_width(one.values.shape[1], two.values.shape[1])
    if not len(two):
        raise ValueError(
            "references must hold at least one sample, got none; pass the training set"
        )
    protocol = {**joint_protocol(one.protocol, two.protocol), "counts": [len(one), len(two)]}
    centre = two.values.float().mean(0)  # distances do not change, rounding shrinks
    known = two.values.float() - centre
    found = [
        _nearest(rows.float() - centre, known)
        for rows in torch.split(one.values.to(known.device), BLOCK)
    ]
    distances = torch.cat([d for d, _ in found] or [known.new_zeros(0, dtype=torch.float64)])
    indices = torch.cat([i for _, i in found] or [known.new_zeros(0, dtype=torch.int64)])
    return Neighbours(distances, indices, protocol)


def _nearest(rows: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Distances [n] and indices [n] of the nearest of ``known`` [M, F] to ``rows`` [n, F]."""
    near = torch.addmm(
        known.square().sum(1), rows, known.T, alpha=-2
    )  # squared distance less |row|², [n, M]
    candidates = near.topk(min(CANDIDATES, len(known)), largest=False).indices  # [n, C]
    exact = torch.stack(
        [(rows - known[c]).double().square().sum(1) for c in candidates.T], dim=1
    )  # [n, C]
    best = exact.argmin(1, keepdim=True)
    return exact.gather(1, best).squeeze(1).sqrt(), candidates.gather(1, best).squeeze(1)
