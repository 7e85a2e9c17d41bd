"""MAR's KL autoencoder (KL-16 and smaller ones), with the official parameter names.

Source: MAR (arXiv 2406.11838), which follows latent diffusion's autoencoder (arXiv 2112.10752).
Shape letters: B batch, R image side, h latent side (R / downsampling), C latent channels. Images
are float in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specmm.image_ar.autoencoder import Decoder, Encoder, Stack

LOG_VARIANCE = (-30.0, 20.0)  # the encoder's answer is clamped to this


@dataclass(frozen=True)
class KLConfig:
    """Sizes; the defaults are the published KL-16. ``scale`` brings latents to unit variance."""

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 16
    resolution: int = 256
    attn_resolutions: tuple[int, ...] = (16,)
    scale: float = 0.2325

    @property
    def downsampling(self) -> int:
        """Pixels per latent cell along one side."""
        return int(2 ** (len(self.ch_mult) - 1))


@dataclass
class Posterior:
    """The encoder's Gaussian over latents, ``mean`` and ``log_var`` [B, C, h, h]."""

    mean: Tensor
    log_var: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """A latent from standard normal ``noise`` of the same shape."""
        return self.mean + torch.exp(0.5 * self.log_var) * noise

    def kl(self) -> Tensor:
        """Divergence [B] (nats) from the standard normal."""
        terms = self.mean.square() + self.log_var.exp() - 1 - self.log_var
        return 0.5 * terms.sum((1, 2, 3))


class AutoencoderKL(nn.Module):
    """The autoencoder: pictures to latents and back."""

    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        self.config = config
        levels = range(len(config.ch_mult))
        attending = [i for i in levels if config.resolution // 2**i in config.attn_resolutions]
        width = config.z_channels
        blocks = config.num_res_blocks
        self.encoder = Encoder(Stack(config.ch, config.ch_mult, blocks, 2 * width, attending))
        # the decoder attends in the middle only
        self.decoder = Decoder(Stack(config.ch, config.ch_mult, blocks + 1, width))
        self.quant_conv = nn.Conv2d(2 * width, 2 * width, 1)
        self.post_quant_conv = nn.Conv2d(width, width, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.quant_conv.weight.dtype

    def encode(self, images: Tensor) -> Posterior:
        """The posterior of images [B, 3, R, R]."""
        mean, log_var = self.quant_conv(self.encoder(images)).chunk(2, dim=1)
        return Posterior(mean, log_var.clamp(*LOG_VARIANCE))

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, R, R] in about [-1, 1] of unscaled latents [B, C, h, h]."""
        return self.decoder(self.post_quant_conv(latents))

    def decode_scaled(self, latents: Tensor) -> Tensor:
        """Images of latents as MAR makes them, multiplied by ``scale``."""
        return self.decode((latents / self.config.scale).to(self.dtype))
