"""How likely the large model finds tokens it did or did not draw: what a switch costs, in nats a
token.

Shape letters: B batch, L tokens of all scales, T tokens of a scale, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.image_ar.scales.feature_map import FeatureMap
from specmm.image_ar.scales.quantizer import MultiScaleQuantizer
from specmm.image_ar.scales.sampling import Choice, Sampling
from specmm.image_ar.scales.session import Session
from specmm.image_ar.scales.var import VAR


@torch.inference_mode()
def log_likelihood(
    model: VAR, quantizer: MultiScaleQuantizer, labels: Tensor, tokens: Tensor, sampling: Sampling
) -> Tensor:
    """Mean log-probability a token [B] of ``tokens`` [B, L] of classes ``labels`` [B] under
    ``model``, scale by scale.

    Guidance and temperature are those of ``sampling`` (temperature 1 where it is greedy); top-k and
    top-p are not applied, since the small model may draw a token that they would exclude. Raises
    ``ValueError`` for another number of tokens than the model's.
    """
    wanted = model.config.schedule.starts[-1]
    if tokens.ndim != 2 or tokens.shape[1] != wanted:
        raise ValueError(f"tokens must be [pictures, {wanted}], got {list(tokens.shape)}")
    feature_map = FeatureMap(quantizer, len(labels))
    session, found = Session(model, labels, sampling, len(feature_map.schedule) - 1), []
    for k, part in enumerate(feature_map.schedule.split(tokens)):
        probs = (
            session.advance(feature_map, k).float() / (sampling.temperature_at(k) or 1.0)
        ).log_softmax(-1)  # [B, T, V]
        found.append(probs.gather(-1, part[..., None])[..., 0])
        feature_map.add(Choice(part))
    return torch.cat(found, dim=1).mean(1)
