"""LlamaGen's VQ image tokenizer (VQ-16, VQ-8 and smaller ones), with the official parameter names.

Source: LlamaGen (arXiv 2406.06525), which follows VQGAN (arXiv 2012.09841) with an L2-normalised
codebook. Shape letters: B batch, C channels, R image side, h latent side (R / downsampling), V
codebook size, E code width. Images are float in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.autoencoder import AttnBlock, Downsample, Level, ResBlock, Upsample, norm


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a tokenizer; the defaults are the published VQ-16."""

    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 256
    codebook_l2_norm: bool = True
    commit_loss_beta: float = 0.25

    @property
    def downsampling(self) -> int:
        """Pixels per token along one side."""
        return int(2 ** (len(self.ch_mult) - 1))


VQ_16 = VQConfig()
VQ_8 = VQConfig(ch_mult=(1, 2, 2, 4))


def _mid(channels: int) -> nn.ModuleList:
    return nn.ModuleList(
        [ResBlock(channels, channels), AttnBlock(channels), ResBlock(channels, channels)]
    )


class Encoder(nn.Module):
    """Images [B, 3, R, R] -> features [B, z_channels, h, h]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in (1, *config.ch_mult)]
        last = len(config.ch_mult) - 1
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for level in range(last + 1):
            block = Level(
                widths[level], widths[level + 1], config.num_res_blocks, level == last, name="res"
            )
            if level != last:
                block.downsample = Downsample(widths[level + 1])
            self.conv_blocks.append(block)
        self.mid = _mid(widths[-1])
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the encoder."""
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Features [B, z_channels, h, h] -> images [B, 3, R, R]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult][::-1]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _mid(widths[0])
        self.conv_blocks = nn.ModuleList()
        for level, width in enumerate(widths):
            block = Level(
                widths[max(level - 1, 0)], width, config.num_res_blocks + 1, level == 0, name="res"
            )
            if level != last:
                block.upsample = Upsample(width)
            self.conv_blocks.append(block)
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Apply the decoder."""
        z = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            z = block(z)
        return self.conv_out(F.silu(self.norm_out(z)))


@dataclass
class Quantized:
    """A quantised batch: ``codes`` [B, E, h, h] (straight-through), ``indices`` [B, h, h], two
    scalar losses.
    """

    codes: Tensor
    indices: Tensor
    codebook_loss: Tensor
    commit_loss: Tensor


class VectorQuantizer(nn.Module):
    """Nearest neighbour in an L2-normalised codebook [V, E]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_embed_dim)
        nn.init.uniform_(
            self.embedding.weight, -1.0 / config.codebook_size, 1.0 / config.codebook_size
        )

    def codebook(self) -> Tensor:
        """The rows that are looked up [V, E]: unit vectors when the tokenizer normalises."""
        weight = self.embedding.weight
        return F.normalize(weight, dim=-1) if self.config.codebook_l2_norm else weight

    def forward(self, z: Tensor) -> Quantized:
        """Quantise features ``z`` [B, E, h, h]."""
        rows = z.permute(0, 2, 3, 1).float()  # [B, h, h, E]
        rows = F.normalize(rows, dim=-1) if self.config.codebook_l2_norm else rows
        book = self.codebook().float()
        distance = book.square().sum(1) - 2 * rows @ book.T  # |rows|^2 is the same for every code
        indices = distance.argmin(-1)  # [B, h, h]
        codes = book[indices]
        codebook_loss = (codes - rows.detach()).square().mean()
        commit_loss = self.config.commit_loss_beta * (codes.detach() - rows).square().mean()
        codes = rows + (codes - rows).detach()
        return Quantized(codes.permute(0, 3, 1, 2), indices, codebook_loss, commit_loss)


class VQModel(nn.Module):
    """The tokenizer: pictures to token grids and back."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quantize = VectorQuantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_embed_dim, config.z_channels, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.quantize.embedding.weight.dtype

    def encode(self, images: Tensor) -> Quantized:
        """Quantise images [B, 3, R, R]."""
        return self.quantize(self.quant_conv(self.encoder(images)))

    def decode(self, codes: Tensor) -> Tensor:
        """Images [B, 3, R, R] of code vectors [B, E, h, h]."""
        return self.decoder(self.post_quant_conv(codes))

    def decode_code(self, indices: Tensor) -> Tensor:
        """Images [B, 3, R, R] in about [-1, 1] of token grids [B, h, h]."""
        codes = self.quantize.codebook()[indices].permute(0, 3, 1, 2)
        return self.decode(codes.to(self.post_quant_conv.weight.dtype))
