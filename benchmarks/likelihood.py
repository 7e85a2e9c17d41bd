"""How likely the target finds the tokens it was given: what a relaxed rule costs, in nats a token.

Shape letters: B batch, G guidance branches, R = G·B rows, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.image_ar.pipeline import ImagePipeline


@torch.inference_mode()
def log_likelihood(pipe: ImagePipeline, labels: Tensor, tokens: Tensor) -> Tensor:
    """Mean log-probability a token [B] of ``tokens`` [B, T] of classes ``labels`` [B], from one causal forward.

    The law is the target's with guidance and temperature but without top-k and top-p, so that it is never zero.
    """
    target, model = pipe.target(top_k=0, top_p=1.0), pipe.transformer
    rows, repeats = labels, 1
    if target.guidance.branches == 2:
        rows, repeats = torch.cat([labels, torch.full_like(labels, model.config.num_classes)]), 2
    logits, _ = model(model.embed(rows, tokens[:, :-1].repeat(repeats, 1)))  # [R, T, V]
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    law = target.processor(target.guide(logits.float(), positions))
    chosen = law.gather(-1, tokens[..., None]).squeeze(-1)
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log().mean(1)
