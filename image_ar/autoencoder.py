"""VQGAN's autoencoder under the official parameter names, and LlamaGen's VQ tokenizer.

MAR's KL-16 and VAR's VQVAE use the same blocks; LlamaGen names their weights differently.

Sources: VQGAN (arXiv 2012.09841), latent diffusion (arXiv 2112.10752), LlamaGen (arXiv 2406.06525),
which normalises its codebook. Shape letters: B batch, C channels, R image side, h latent side
(R / downsampling), V codebook size, E code width. Images are float in [-1, 1].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm(channels: int) -> nn.GroupNorm:
    """The normalisation that all blocks share."""
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: [B, C_in, h, h] -> [B, C_out, h, h]."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1 = norm(c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = norm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.nin_shortcut = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(y))) + self.nin_shortcut(x)


class AttnBlock(nn.Module):
    """Single-head self-attention over the h*h cells: [B, C, h, h] -> [B, C, h, h]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.norm(x)
        q, k, v = (f(y).flatten(2).transpose(1, 2) for f in (self.q, self.k, self.v))  # [B, h*h, C]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(y)


class Downsample(nn.Module):
    """Halve the side, padding right and bottom only: [B, C, h, h] -> [B, C, h/2, h/2]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution."""
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Double the side, nearest neighbour, then a convolution: [B, C, h, h] -> [B, C, 2h, 2h]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolution."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


@dataclass(frozen=True)
class Stack:
    """Sizes of an encoder or decoder.

    ``ch`` · ``ch_mult`` channels by level from full resolution down, ``blocks`` residual blocks
    each, attention of ``kind`` at the ``attending`` levels, ``latent`` channels at the small end;
    ``llamagen`` gives the modules LlamaGen's names.
    """

    ch: int
    ch_mult: tuple[int, ...]
    blocks: int
    latent: int
    attending: Collection[int] = ()
    kind: Callable[[int], nn.Module] = AttnBlock
    llamagen: bool = False

    def middle(self, channels: int) -> nn.Sequential:
        """Attention between two residual blocks: [B, C, h, h] -> [B, C, h, h]."""
        names = ("0", "1", "2") if self.llamagen else ("block_1", "attn_1", "block_2")
        blocks = (ResBlock(channels, channels), self.kind(channels), ResBlock(channels, channels))
        return nn.Sequential(OrderedDict(zip(names, blocks, strict=True)))


class ResLevel(nn.Module):
    """Level ``i`` of a stack: residual blocks, each with optional attention, then a resampling."""

    def __init__(
        self, stack: Stack, i: int, c_in: int, c_out: int, resample: Literal["down", "up", ""]
    ) -> None:
        super().__init__()
        self.name = "res" if stack.llamagen else "block"
        blocks = (ResBlock(c_in if n == 0 else c_out, c_out) for n in range(stack.blocks))
        self.add_module(self.name, nn.ModuleList(blocks))
        attentions = stack.blocks if i in stack.attending else 0
        self.attn = nn.ModuleList(stack.kind(c_out) for _ in range(attentions))
        self.downsample = Downsample(c_out) if resample == "down" else nn.Identity()
        self.upsample = Upsample(c_out) if resample == "up" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, c_in, h, h] -> [B, c_out, h', h']."""
        for i, block in enumerate(getattr(self, self.name)):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        return self.upsample(self.downsample(x))


class Encoder(nn.Module):
    """Images [B, 3, R, R] -> features [B, latent, h, h]."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        widths = [stack.ch * m for m in (1, *stack.ch_mult)]
        last = len(stack.ch_mult) - 1
        self.conv_in = nn.Conv2d(3, stack.ch, 3, padding=1)
        self.name = "conv_blocks" if stack.llamagen else "down"
        levels = (
            ResLevel(stack, i, widths[i], widths[i + 1], "down" if i < last else "")
            for i in range(last + 1)
        )
        self.add_module(self.name, nn.ModuleList(levels))
        self.mid = stack.middle(widths[-1])
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], stack.latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the encoder."""
        x = self.conv_in(x)
        for level in getattr(self, self.name):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Features [B, latent, h, h] -> images [B, 3, R, R].

    Levels are numbered from full resolution down and run in reverse; LlamaGen numbers them in the
    order in which they run.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        widths = [stack.ch * m for m in (*stack.ch_mult, stack.ch_mult[-1])]
        self.conv_in = nn.Conv2d(stack.latent, widths[-1], 3, padding=1)
        self.mid = stack.middle(widths[-1])
        self.name = "conv_blocks" if stack.llamagen else "up"
        self.reverse = not stack.llamagen
        numbers = range(len(stack.ch_mult))
        levels = (
            ResLevel(stack, i, widths[i + 1], widths[i], "up" if i else "")
            for i in (numbers if self.reverse else reversed(numbers))
        )
        self.add_module(self.name, nn.ModuleList(levels))
        self.norm_out = norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Apply the decoder."""
        z = self.mid(self.conv_in(z))
        levels = getattr(self, self.name)
        for level in reversed(levels) if self.reverse else levels:
            z = level(z)
        return self.conv_out(F.silu(self.norm_out(z)))


def to_uint8(images: Tensor) -> Tensor:
    """Pictures [B, R, R, 3] uint8 of decoder outputs [B, 3, R, R] (LlamaGen's rounding).

    Raises ``ValueError`` for NaN or infinity, which would show as black.
    """
    if not bool(images.isfinite().all()):
        raise ValueError(
            "pixels must be finite, got NaN or infinity from the decoder of tokens; check its "
            "weights or run it in float32"
        )
    return (127.5 * images.float() + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


@dataclass(frozen=True)
class VQConfig:
    """Sizes of LlamaGen's tokenizer; the defaults are VQ-16, VQ-8 has ``ch_mult`` (1, 2, 2, 4)."""

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

    def stack(self, blocks: int) -> Stack:
        """The levels of its encoder or decoder, with ``blocks`` residual blocks each."""
        lowest = [len(self.ch_mult) - 1]
        return Stack(self.ch, self.ch_mult, blocks, self.z_channels, lowest, llamagen=True)


@dataclass
class VQCodes:
    """A quantised batch: ``codes`` [B, E, h, h] (straight-through), ``indices`` [B, h, h], loss."""

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
        limit = 1.0 / config.codebook_size
        nn.init.uniform_(self.embedding.weight, -limit, limit)

    def codebook(self) -> Tensor:
        """The rows that are looked up [V, E]: unit vectors when the tokenizer normalises."""
        weight = self.embedding.weight
        return F.normalize(weight, dim=-1) if self.config.codebook_l2_norm else weight

    def forward(self, z: Tensor) -> VQCodes:
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
        return VQCodes(codes.permute(0, 3, 1, 2), indices, codebook_loss, commit_loss)


class VQModel(nn.Module):
    """LlamaGen's tokenizer: pictures to token grids and back."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.stack(config.num_res_blocks))
        self.decoder = Decoder(config.stack(config.num_res_blocks + 1))
        self.quantize = VectorQuantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_embed_dim, config.z_channels, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.quantize.embedding.weight.dtype

    def encode(self, images: Tensor) -> VQCodes:
        """Quantise images [B, 3, R, R]."""
        return self.quantize(self.quant_conv(self.encoder(images)))

    def decode(self, codes: Tensor) -> Tensor:
        """Images [B, 3, R, R] of code vectors [B, E, h, h]."""
        return self.decoder(self.post_quant_conv(codes))

    def decode_code(self, indices: Tensor) -> Tensor:
        """Images [B, 3, R, R] in about [-1, 1] of token grids [B, h, h]."""
        codes = self.quantize.codebook()[indices].permute(0, 3, 1, 2)
        return self.decode(codes.to(self.post_quant_conv.weight.dtype))
