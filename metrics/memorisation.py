"""MiFID: a Fréchet distance that memorising makes worse (Bai et al. 2021, sec. 3.2; Kaggle's
generative dogs).

The Fréchet distance over the memorisation distance: the mean over made samples of 1 - |cos| to the
nearest training sample, which counts as 1 from the threshold on. The threshold 0.1 is the published
one, for 2048-d Inception features; other features need their own.

Shapes: real [N, F], made [M, F].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.features import FeatureSet, as_features
from specmm.metrics.frechet import frechet_distance
from specmm.metrics.measurement import Measurement

THRESHOLD = 0.1
# a Fréchet distance this small is none at all, and its quotient with a tiny distance means nothing
NOTHING = 1e-8
OFFSET = (
    1e-14  # added to the memorisation distance by the published code, so that copies give a number
)
BLOCK = 1024  # rows of the cosine matrix held at a time


def memorisation_distance(
    real: FeatureSet | Tensor | np.ndarray,
    made: FeatureSet | Tensor | np.ndarray,
    *,
    threshold: float = THRESHOLD,
) -> Measurement:
    """MiFID of ``made`` [M, F] against the training samples ``real`` [N, F].

    ``parts``: ``fid`` and ``cosine_distance``, the latter before the threshold. Raises
    ``ValueError`` for whatever ``frechet_distance`` refuses, and for sets of nothing but zero
    vectors.
    """
    one, two = as_features(real), as_features(made)
    fid = frechet_distance(one, two)
    near = mean_cosine_distance(two.values, one.values)
    penalty = near if near < threshold else 1.0
    value = fid.value / (penalty + OFFSET) if fid.value > NOTHING else 0.0
    protocol = {**fid.protocol, "cosine_threshold": threshold}
    return Measurement("mifid", value, protocol, {"fid": fid.value, "cosine_distance": near})


def mean_cosine_distance(made: Tensor, real: Tensor) -> float:
    """Mean over ``made`` [M, F] of the smallest 1 - |cos| to a row of ``real`` [N, F]; zero vectors
    are left out.
    """
    x, y = _directions(made), _directions(real.to(made.device))
    nearest = [(rows @ y.T).abs_().max(1).values for rows in x.split(BLOCK)]
    return float((1 - torch.cat(nearest)).clamp_(min=0).mean())


def _directions(values: Tensor) -> Tensor:
    """The rows [N, F] that are not zero, at length 1, in float64."""
    exact = values.double()
    lengths = exact.norm(dim=1, keepdim=True)
    kept = lengths.squeeze(1) > 0
    if not kept.any():
        raise ValueError(
            "a cosine distance needs vectors other than zero, got none; check the features"
        )
    return exact[kept] / lengths[kept]
