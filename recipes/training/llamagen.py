"""Training of a class-conditional LlamaGen target on token grids made by its tokenizer.

Shape letters: M pictures, h latent side, T = h² tokens a picture.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.training.pictures import labelled_batch
from specmm.core.randomness import seeded
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.recipes.loop import Losses, Run, fit


def train_target(
    tokens: Tensor,
    labels: Tensor,
    config: GPTConfig,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
) -> Transformer:
    """Train on ``tokens`` [M, 2, T] with ``labels`` [M]; resumes from ``out/checkpoint.pt``."""
    with seeded(seed):
        model = Transformer(config)
    loss_of = torch.compile(lambda labels, tokens: token_loss(model, labels, tokens))

    def step(i: int) -> Losses:
        classes, drawn = labelled_batch(tokens, labels, i, batch, seed, config.num_classes)
        with torch.autocast("cpu", torch.bfloat16):
            return {"loss": loss_of(classes, drawn)}

    fit(model, step, Run(out, steps, lr))
    return model


def token_loss(model: Transformer, labels: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy (nats a token) of ``tokens`` [B, T] given classes [B]."""
    logits, _ = model(model.embed(labels, tokens[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
