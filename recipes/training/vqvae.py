"""Training of VAR's multi-scale VQVAE on pictures [N, R, R, 3] uint8.

The losses are those of the token models' tokenizer (L1 on pixels and edges) and the quantizer's,
over all scales. Codes that nobody used for a while are moved onto what some scale had left to
quantise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.training.pictures import RESTART_EVERY, flip_some, reconstruction_loss
from specmm.core.randomness import seeded
from specmm.image_ar.scales.vqvae import VQVAE, MultiScaleQuantizer, VQVAEConfig
from specmm.recipes.loop import Losses, Run, batch_rows, fit
from specmm.recipes.pictures import encode_views, to_float


@dataclass
class QuantizedScales:
    """``f_hat`` [B, E, P, P] (straight-through), tokens [B, p²] by scale, and the VQ loss."""

    f_hat: Tensor
    tokens: list[Tensor]
    loss: Tensor


def quantise(quantizer: MultiScaleQuantizer, features: Tensor) -> QuantizedScales:
    """Quantise ``features`` [B, E, P, P] with gradients; the loss is the mean over scales.

    In float32 whatever autocast says: what one scale rounds away the next has to encode.
    """
    with torch.autocast(features.device.type, enabled=False):
        features = features.float()
        fixed = features.detach()
        f_hat = torch.zeros_like(fixed)
        loss = fixed.new_zeros(())
        tokens: list[Tensor] = []
        for k in range(len(quantizer.schedule)):
            rest = quantizer.downsample(fixed - f_hat.detach(), k)
            tokens.append(quantizer.nearest(rest))
            f_hat = f_hat + quantizer.contribution(quantizer.codes(tokens[k]), k)
            commitment = quantizer.beta * F.mse_loss(features, f_hat.detach())
            loss = loss + F.mse_loss(f_hat, fixed) + commitment
        straight_through = features + (f_hat - features).detach()
        return QuantizedScales(straight_through, tokens, loss / len(quantizer.schedule))


def _reconstruct(model: VQVAE, images: Tensor) -> tuple[Tensor, QuantizedScales]:
    """Reconstruction [B, 3, R, R] (not clamped) and what was quantised."""
    quantized = quantise(model.quantize, model.features(images))
    return model.decoder(model.post_quant_conv(quantized.f_hat)), quantized


def train_vqvae(
    images: Tensor,
    config: VQVAEConfig,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 6e-4,
    seed: int = 0,
    compiled: bool = True,
) -> VQVAE:
    """Train on ``images`` [N, R, R, 3] uint8 and return the tokenizer; resumes from
    ``out/checkpoint.pt``.
    """
    with seeded(seed):
        model = VQVAE(config)
        model.quantize.embedding.weight.data.normal_()
    used = torch.zeros(config.vocab_size)
    forward = torch.compile(_reconstruct) if compiled else _reconstruct

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        x = flip_some(to_float(images[batch_rows(i, batch, len(images), seed)]), generator)
        if i % RESTART_EVERY == RESTART_EVERY - 1 and i < steps * 0.8:
            _restart_unused(model, used, x, generator)
        with torch.autocast("cpu", torch.bfloat16):
            made, quantized = forward(model, x)
        return _losses(made.float(), quantized, x, used)

    fit(model, step, Run(out, steps, lr), weight_decay=0.0)
    return model


def _losses(made: Tensor, quantized: QuantizedScales, x: Tensor, used: Tensor) -> Losses:
    for tokens in quantized.tokens:
        used.index_add_(0, tokens.flatten(), torch.ones(tokens.numel()))
    recon = reconstruction_loss(made, x)
    alive = (used > 0).float().mean()
    loss = recon + quantized.loss
    return {"loss": loss, "reconstruction": recon, "mse": F.mse_loss(made, x), "used": alive}


@torch.no_grad()
def _restart_unused(model: VQVAE, used: Tensor, x: Tensor, generator: torch.Generator) -> None:
    dead = (used == 0).nonzero()[:, 0]
    rows = torch.cat(
        [left.flatten(0, 1) for left, _ in model.quantize.residuals(model.features(x))]
    )
    chosen = torch.randint(len(rows), (len(dead),), generator=generator)
    model.quantize.embedding.weight[dead] = rows[chosen]
    used.zero_()


def encode_pictures(vqvae: VQVAE, images: Tensor, batch: int = 64) -> Tensor:
    """Tokens [M, 2, L], all scales concatenated, of pictures [M, R, R, 3] uint8 and of their
    mirror images.
    """
    vqvae.eval()
    return encode_views(lambda x: torch.cat(vqvae.encode(x), dim=1), images, batch)
