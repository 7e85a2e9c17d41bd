"""MAR's KL autoencoder (KL-16 and smaller ones), with the official parameter names.

Source: MAR (arXiv 2406.11838), which follows latent diffusion's autoencoder (arXiv 2112.10752). Shape letters: B batch,
R image side, h latent side (R / downsampling), C latent channels. Images are float in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.tokens.vq import AttnBlock, Downsample, ResBlock, Upsample

LOG_VARIANCE = (-30.0, 20.0)  # the encoder's answer is clamped to this


@dataclass(frozen=True)
class KLConfig:
    """Sizes of an autoencoder; the defaults are the published KL-16. ``scale`` brings latents to unit variance."""

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


class Middle(nn.Module):
    """Attention between two residual blocks: [B, c, h, h] -> [B, c, h, h]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1, self.attn_1 = ResBlock(channels, channels), AttnBlock(channels)
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the three."""
        return self.block_2(self.attn_1(self.block_1(x)))


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention if there is any, then a resampling."""

    def __init__(self, c_in: int, c_out: int, blocks: int, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(c_out) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, c_in, h, h] -> [B, c_out, h', h']."""
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for resample in ("downsample", "upsample"):
            if hasattr(self, resample):
                x = getattr(self, resample)(x)
        return x


class Encoder(nn.Module):
    """Images [B, 3, R, R] -> [B, 2C, h, h]."""

    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in (1, *config.ch_mult)]
        last = len(config.ch_mult) - 1
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.down = nn.ModuleList()
        for i in range(last + 1):
            attention = config.resolution // 2**i in config.attn_resolutions
            level = Level(widths[i], widths[i + 1], config.num_res_blocks, attention)
            if i != last:
                level.downsample = Downsample(widths[i + 1])
            self.down.append(level)
        self.mid = Middle(widths[-1])
        self.norm_out = nn.GroupNorm(32, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the encoder."""
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Latents [B, C, h, h] -> images [B, 3, R, R]; the release has no attention here but in the middle."""

    def __init__(self, config: KLConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList()
        for i, width in enumerate(widths):  # level i is run after level i + 1
            level = Level(widths[min(i + 1, len(widths) - 1)], width, config.num_res_blocks + 1, False)
            if i:
                level.upsample = Upsample(width)
            self.up.append(level)
        self.norm_out = nn.GroupNorm(32, widths[0], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Apply the decoder."""
        z = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            z = level(z)
        return self.conv_out(F.silu(self.norm_out(z)))


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
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quant_conv = nn.Conv2d(2 * config.z_channels, 2 * config.z_channels, 1)
        self.post_quant_conv = nn.Conv2d(config.z_channels, config.z_channels, 1)

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
