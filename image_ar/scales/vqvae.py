"""VAR's image tokenizer: a VQGAN-like autoencoder around the multi-scale quantizer.

Sources: VAR (arXiv 2404.02905), VQGAN (arXiv 2012.09841); parameter names are the official ones.
Shape letters: B batch, R image side, P latent side (R / downsampling), E code width, C channels.
Images are float in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.autoencoder import Decoder, Encoder, Stack, norm
from specmm.image_ar.scales.quantizer import MultiScaleQuantizer, QuantizedScales
from specmm.image_ar.scales.scale_schedule import PATCHES_256, ScaleSchedule


@dataclass(frozen=True)
class VQVAEConfig:
    """Sizes; the defaults are the published ``vae_ch160v4096z32``, which also serves 512 px."""

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
        ScaleSchedule(self.patch_nums)

    @property
    def downsampling(self) -> int:
        """Pixels per finest token along one side."""
        return int(2 ** (len(self.ch_mult) - 1))

    @property
    def schedule(self) -> ScaleSchedule:
        """The scales."""
        return ScaleSchedule(self.patch_nums)


class VQVAEAttention(nn.Module):
    """Single-head self-attention over the cells, its projections fused."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, P, P] -> [B, C, P, P]."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)  # [B, P², C]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(y)


class VQVAE(nn.Module):
    """The tokenizer: pictures to token grids of every scale and back."""

    def __init__(self, config: VQVAEConfig) -> None:
        super().__init__()
        self.config = config
        width = config.z_channels
        lowest = [len(config.ch_mult) - 1]
        stack = Stack(
            config.ch, config.ch_mult, config.num_res_blocks, width, lowest, VQVAEAttention
        )
        self.encoder = Encoder(stack)
        self.decoder = Decoder(replace(stack, blocks=config.num_res_blocks + 1))
        self.quantize = MultiScaleQuantizer(
            config.vocab_size,
            width,
            config.schedule,
            config.share_quant_resi,
            config.quant_resi,
            config.using_znorm,
            config.beta,
        )
        kernel = config.quant_conv_ks
        self.quant_conv = nn.Conv2d(width, width, kernel, padding=kernel // 2)
        self.post_quant_conv = nn.Conv2d(width, width, kernel, padding=kernel // 2)

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
        """Images [B, 3, R, R] in [-1, 1] of f_hat [B, E, P, P]."""
        return self.decoder(self.post_quant_conv(f_hat.to(self.dtype))).clamp(-1, 1)

    def decode_tokens(self, tokens: Sequence[Tensor]) -> Tensor:
        """Images [B, 3, R, R] of the tokens [B, p²] of every scale, or of the first few."""
        return self.decode(self.quantize.f_hats(tokens)[-1])

    def forward(self, images: Tensor) -> tuple[Tensor, QuantizedScales]:
        """Reconstruction [B, 3, R, R] (not clamped) and what was quantised, with gradients."""
        quantized = self.quantize(self.features(images))
        return self.decoder(self.post_quant_conv(quantized.f_hat)), quantized
