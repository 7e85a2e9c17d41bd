"""VAR's image tokenizer: a VQGAN-like autoencoder around the multi-scale quantizer, with the official names.

Source: VAR (arXiv 2404.02905), which follows VQGAN (arXiv 2012.09841). Shape letters: B batch, R image side, P latent
side (R / downsampling), E code width, C channels. Images are float in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.scales.ladder import PATCHES_256, Ladder
from specmm.image_ar.scales.quantizer import MultiScaleQuantizer, Quantized
from specmm.image_ar.tokens.vq import Downsample, ResBlock, Upsample


@dataclass(frozen=True)
class VQVAEConfig:
    """Sizes of a tokenizer; the defaults are the published ``vae_ch160v4096z32``, which also serves 512 px."""

    vocab_size: int = 4096
    z_channels: int = 32
    ch: int = 160
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    patch_nums: tuple[int, ...] = PATCHES_256
    share_quant_resi: int = 4
    quant_resi: float = 0.5
    using_znorm: bool = False
    quant_conv_ks: int = 3
    beta: float = 0.25

    def __post_init__(self) -> None:
        Ladder(self.patch_nums)

    @property
    def downsampling(self) -> int:
        """Pixels per finest token along one side."""
        return int(2 ** (len(self.ch_mult) - 1))

    @property
    def ladder(self) -> Ladder:
        """The scales."""
        return Ladder(self.patch_nums)


class AttnBlock(nn.Module):
    """Single-head self-attention over the cells, its projections fused: [B, C, P, P] -> [B, C, P, P]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = _norm(channels), nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)  # [B, P², C]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(y)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention at the lowest one, then a resampling."""

    def __init__(self, c_in: int, c_out: int, blocks: int, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(c_out) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, h, h] -> [B, C_out, h', h']."""
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for resample in ("downsample", "upsample"):
            if hasattr(self, resample):
                x = getattr(self, resample)(x)
        return x


class Middle(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1, self.attn_1 = ResBlock(channels, channels), AttnBlock(channels)
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, P, P] -> [B, C, P, P]."""
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Images [B, 3, R, R] -> features [B, E, P, P]."""

    def __init__(self, config: VQVAEConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in (1, *config.ch_mult)]
        last = len(config.ch_mult) - 1
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.down = nn.ModuleList()
        for level in range(last + 1):
            block = Level(widths[level], widths[level + 1], config.num_res_blocks, level == last)
            if level != last:
                block.downsample = Downsample(widths[level + 1])
            self.down.append(block)
        self.mid, self.norm_out = Middle(widths[-1]), _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the encoder."""
        x = self.conv_in(x)
        for block in (*self.down, self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Features [B, E, P, P] -> images [B, 3, R, R]; ``up[0]`` is the level of full resolution."""

    def __init__(self, config: VQVAEConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in (*config.ch_mult, config.ch_mult[-1])]
        last = len(config.ch_mult) - 1
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid, self.up = Middle(widths[-1]), nn.ModuleList()
        for level in range(last + 1):
            block = Level(widths[level + 1], widths[level], config.num_res_blocks + 1, level == last)
            if level > 0:
                block.upsample = Upsample(widths[level])
            self.up.append(block)
        self.norm_out, self.conv_out = _norm(widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Apply the decoder."""
        z = self.conv_in(z)
        for block in (self.mid, *list(self.up)[::-1]):
            z = block(z)
        return self.conv_out(F.silu(self.norm_out(z)))


class VQVAE(nn.Module):
    """The tokenizer: pictures to token grids of every scale and back."""

    def __init__(self, config: VQVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quantize = MultiScaleQuantizer(
            config.vocab_size,
            config.z_channels,
            config.ladder,
            config.share_quant_resi,
            config.quant_resi,
            config.using_znorm,
            config.beta,
        )
        kernel, padding = config.quant_conv_ks, config.quant_conv_ks // 2
        self.quant_conv = nn.Conv2d(config.z_channels, config.z_channels, kernel, padding=padding)
        self.post_quant_conv = nn.Conv2d(config.z_channels, config.z_channels, kernel, padding=padding)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.post_quant_conv.weight.dtype

    def features(self, images: Tensor) -> Tensor:
        """What is quantised [B, E, P, P] of images [B, 3, R, R]."""
        return self.quant_conv(self.encoder(images))

    def encode(self, images: Tensor) -> list[Tensor]:
        """Tokens [B, p²] of every scale of images [B, 3, R, R]."""
        return self.quantize.encode(self.features(images))

    def decode(self, f_hat: Tensor) -> Tensor:
        """Images [B, 3, R, R] in [-1, 1] of sums [B, E, P, P]."""
        return self.decoder(self.post_quant_conv(f_hat.to(self.dtype))).clamp(-1, 1)

    def decode_tokens(self, tokens: Sequence[Tensor]) -> Tensor:
        """Images [B, 3, R, R] of the tokens [B, p²] of every scale, or of the first few."""
        return self.decode(self.quantize.f_hats(tokens)[-1])

    def forward(self, images: Tensor) -> tuple[Tensor, Quantized]:
        """Reconstruction [B, 3, R, R] (not clamped) and what was quantised, with gradients."""
        quantized = self.quantize(self.features(images))
        return self.decoder(self.post_quant_conv(quantized.f_hat)), quantized
