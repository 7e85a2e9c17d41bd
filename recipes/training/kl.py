"""Training of a KL autoencoder on pictures [N, R, R, 3] uint8.

The loss is L1 on pixels and on pixel differences (edges), plus a little of the posterior's
divergence from the standard normal (latent diffusion, arXiv 2112.10752, appendix G). At the end the
latents' scale is measured, so that tokens have unit variance, which the head's schedule is made
for. Shape letters: B batch, C latent channels, h latent side.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.training.pictures import flip_some, reconstruction_loss
from specmm.core.randomness import seeded
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig, Posterior
from specmm.recipes.loop import Losses, Run, batch_rows, fit
from specmm.recipes.pictures import encode_views, to_float


def train_kl(
    images: Tensor,
    config: KLConfig,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 6e-4,
    kl_weight: float = 1e-3,
    seed: int = 0,
    compiled: bool = True,
) -> AutoencoderKL:
    """Train on ``images`` [N, R, R, 3] uint8; resumes from ``out/checkpoint.pt``.

    ``kl_weight`` multiplies the divergence in nats per latent number. The result's ``config.scale``
    is the inverse standard deviation of its latents.
    """
    with seeded(seed):
        model = AutoencoderKL(config)
    forward = torch.compile(_reconstruct) if compiled else _reconstruct

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        x = flip_some(to_float(images[batch_rows(i, batch, len(images), seed)]), generator)
        side = x.shape[-1] // config.downsampling
        noise = torch.randn(len(x), config.z_channels, side, side, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            made, mean, log_var = forward(model, x, noise)
        recon = reconstruction_loss(made.float(), x)
        kl = Posterior(mean.float(), log_var.float()).kl().mean()
        return {
            "loss": recon + kl_weight * kl / noise[0].numel(),
            "reconstruction": recon,
            "mse": F.mse_loss(made.float(), x),
            "kl": kl / noise[0].numel(),
        }

    fit(model, step, Run(out, steps, lr), weight_decay=0.0)
    model.eval()
    moments = encode_moments(model, images)
    model.config = replace(config, scale=1 / latent_std(moments))
    return model


def _reconstruct(model: AutoencoderKL, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    posterior = model.encode(x)
    return model.decode(posterior.sample(noise)), posterior.mean, posterior.log_var


def encode_moments(model: AutoencoderKL, images: Tensor, batch: int = 64) -> Tensor:
    """Unscaled means and log variances [M, 2, 2, C, h, h] (mirrored or not, mean or log variance)
    of M pictures.
    """

    def moments(x: Tensor) -> Tensor:
        posterior = model.encode(x)
        return torch.stack([posterior.mean, posterior.log_var], dim=1)

    return encode_views(moments, images, batch)


def latent_std(moments: Tensor) -> float:
    """Standard deviation of latents drawn from ``moments`` [M, 2, 2, C, h, h]."""
    mean, log_var = moments.unbind(2)
    return float((mean.var() + log_var.exp().mean()).sqrt())
