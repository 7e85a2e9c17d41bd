"""Training of a VQ tokenizer on pictures [N, R, R, 3] uint8.

The loss is L1 on pixels and on pixel differences (edges), plus the codebook and commitment terms of
VQGAN. Codes that nobody used for a while are moved onto encoder outputs of the current batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.training.pictures import RESTART_EVERY, flip_some, reconstruction_loss
from specmm.core.randomness import seeded
from specmm.image_ar.autoencoder import VQCodes, VQConfig, VQModel
from specmm.recipes.loop import Losses, Run, batch_rows, fit
from specmm.recipes.pictures import to_float


def train_tokenizer(
    images: Tensor,
    config: VQConfig,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 6e-4,
    seed: int = 0,
) -> VQModel:
    """Train on ``images`` [N, R, R, 3] uint8 and return the tokenizer; resumes from
    ``out/checkpoint.pt``.
    """
    with seeded(seed):
        model = VQModel(config)
    train_codes(model, images, out, steps=steps, batch=batch, lr=lr, seed=seed)
    return model


def train_codes(
    model: Any, images: Tensor, out: Path, *, steps: int, batch: int, lr: float, seed: int
) -> None:
    """Train ``model``, a :class:`VQModel` or what has its parts and methods, in place on ``images``
    [N, R, R, 3] uint8; resumes from ``out/checkpoint.pt``.
    """
    with seeded(seed):
        model.quantize.embedding.weight.data.normal_()
    used = torch.zeros(len(model.quantize.embedding.weight))
    forward = torch.compile(lambda x: _reconstruct(model, x))

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(images), seed)
        x = flip_some(to_float(images[rows]), generator)
        if i % RESTART_EVERY == RESTART_EVERY - 1 and i < steps * 0.8:
            _restart_unused(model, used, x, generator)
        with torch.autocast("cpu", torch.bfloat16):
            made, quantized = forward(x)
        used.index_add_(0, quantized.indices.flatten(), torch.ones(quantized.indices.numel()))
        recon = reconstruction_loss(made.float(), x)
        alive = (used > 0).float().mean()
        return {
            "loss": recon + quantized.codebook_loss + quantized.commit_loss,
            "reconstruction": recon,
            "mse": F.mse_loss(made.float(), x),
            "used": alive,
        }

    fit(model, step, Run(out, steps, lr), weight_decay=0.0)


def _reconstruct(model: Any, x: Tensor) -> tuple[Tensor, VQCodes]:
    quantized = model.encode(x)
    return model.decode(quantized.codes), quantized


@torch.no_grad()
def _restart_unused(model: Any, used: Tensor, x: Tensor, generator: torch.Generator) -> None:
    dead = (used == 0).nonzero()[:, 0]
    features = model.quant_conv(model.encoder(x))
    rows = F.normalize(features.permute(0, 2, 3, 1).flatten(0, 2), dim=-1)
    chosen = torch.randint(len(rows), (len(dead),), generator=generator)
    model.quantize.embedding.weight[dead] = rows[chosen]
    used.zero_()
