"""LlamaGen's VQ image tokenizer (VQ-16, VQ-8 and smaller ones), with the official parameter names.

Source: LlamaGen (arXiv 2406.06525), which follows VQGAN (arXiv 2012.09841) with an L2-normalised codebook.
Shape letters: B batch, C channels, R image side, h latent side (R / downsampling), V codebook size, E code width.
Images are float in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: [B, C_in, h, h] -> [B, C_out, h, h]."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2, self.conv2 = _norm(c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
        if c_in != c_out:
            self.nin_shortcut = nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return y + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    """Single-head self-attention over the h*h cells: [B, C, h, h] -> [B, C, h, h]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.norm(x)
        q, k, v = (f(y).flatten(2).transpose(1, 2) for f in (self.q, self.k, self.v))  # [B, h*h, C]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(y)


class Downsample(nn.Module):
    """Halve the side, padding right and bottom only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, h] -> [B, C, h/2, h/2]."""
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Double the side: nearest neighbour, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, h] -> [B, C, 2h, 2h]."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention at the lowest one, then a resampling."""

    def __init__(self, c_in: int, c_out: int, blocks: int, attention: bool) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(c_out) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, h, h] -> [B, C_out, h', h']."""
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for resample in ("downsample", "upsample"):
            if hasattr(self, resample):
                x = getattr(self, resample)(x)
        return x


def _mid(channels: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(channels, channels), AttnBlock(channels), ResBlock(channels, channels)])


class Encoder(nn.Module):
    """Images [B, 3, R, R] -> features [B, z_channels, h, h]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.ch * m for m in (1, *config.ch_mult)]
        last = len(config.ch_mult) - 1
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for level in range(last + 1):
            block = Level(widths[level], widths[level + 1], config.num_res_blocks, level == last)
            if level != last:
                block.downsample = Downsample(widths[level + 1])
            self.conv_blocks.append(block)
        self.mid = _mid(widths[-1])
        self.norm_out = _norm(widths[-1])
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
            block = Level(widths[max(level - 1, 0)], width, config.num_res_blocks + 1, level == 0)
            if level != last:
                block.upsample = Upsample(width)
            self.conv_blocks.append(block)
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Apply the decoder."""
        z = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            z = block(z)
        return self.conv_out(F.silu(self.norm_out(z)))


@dataclass
class Quantized:
    """A quantised batch: ``codes`` [B, E, h, h] (straight-through), ``indices`` [B, h, h], two scalar losses."""

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
        nn.init.uniform_(self.embedding.weight, -1.0 / config.codebook_size, 1.0 / config.codebook_size)

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


def to_uint8(images: Tensor) -> Tensor:
    """Pictures [B, R, R, 3] uint8 of decoder outputs [B, 3, R, R] (LlamaGen's rounding)."""
    return (127.5 * images.float() + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
