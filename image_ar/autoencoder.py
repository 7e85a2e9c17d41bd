"""Autoencoders of pictures as the families' tokenizers have them: VQGAN's blocks, under the
official names.

``Encoder`` and ``Decoder`` are those of MAR's KL-16 and of VAR's VQVAE; LlamaGen names its levels
otherwise.

Sources: VQGAN (arXiv 2012.09841), latent diffusion (arXiv 2112.10752). Shape letters: B batch, C
channels, R image side, h side of a feature map.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[[int], nn.Module]


def norm(channels: int) -> nn.GroupNorm:
    """The normalisation of all of them."""
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: [B, C_in, h, h] -> [B, C_out, h, h]."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2, self.conv2 = norm(c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
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
        self.norm = norm(channels)
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
    """Residual blocks of one resolution, each followed by attention if there is any, then a
    resampling.

    The blocks are called ``name``; ``downsample`` or ``upsample`` are set by whoever stacks levels.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        blocks: int,
        attention: bool,
        kind: Attention = AttnBlock,
        name: str = "block",
    ) -> None:
        super().__init__()
        self.name = name
        self.add_module(
            name, nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out) for i in range(blocks))
        )
        self.attn = nn.ModuleList(kind(c_out) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, c_in, h, h] -> [B, c_out, h', h']."""
        for i, block in enumerate(getattr(self, self.name)):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for resample in ("downsample", "upsample"):
            if hasattr(self, resample):
                x = getattr(self, resample)(x)
        return x


class Middle(nn.Module):
    """Attention between two residual blocks: [B, C, h, h] -> [B, C, h, h]."""

    def __init__(self, channels: int, kind: Attention = AttnBlock) -> None:
        super().__init__()
        self.block_1, self.attn_1 = ResBlock(channels, channels), kind(channels)
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the three."""
        return self.block_2(self.attn_1(self.block_1(x)))


@dataclass(frozen=True)
class Stack:
    """Levels of an encoder or decoder: ``ch`` · ``ch_mult`` channels from full resolution down,
    ``blocks`` residual blocks each, attention of ``kind`` at the ``attending`` levels, ``latent``
    channels at the small end.
    """

    ch: int
    ch_mult: tuple[int, ...]
    blocks: int
    latent: int
    attending: Collection[int] = ()
    kind: Attention = AttnBlock


class Encoder(nn.Module):
    """Images [B, 3, R, R] -> features [B, latent, h, h]; ``down[0]`` is the level of full
    resolution.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        widths = [stack.ch * m for m in (1, *stack.ch_mult)]
        last = len(stack.ch_mult) - 1
        self.conv_in = nn.Conv2d(3, stack.ch, 3, padding=1)
        self.down = nn.ModuleList()
        for i in range(last + 1):
            level = Level(widths[i], widths[i + 1], stack.blocks, i in stack.attending, stack.kind)
            if i != last:
                level.downsample = Downsample(widths[i + 1])
            self.down.append(level)
        self.mid, self.norm_out = Middle(widths[-1], stack.kind), norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], stack.latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the encoder."""
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Features [B, latent, h, h] -> images [B, 3, R, R]; ``up[0]`` is the level of full resolution,
    the last to run.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        widths = [stack.ch * m for m in (*stack.ch_mult, stack.ch_mult[-1])]
        self.conv_in = nn.Conv2d(stack.latent, widths[-1], 3, padding=1)
        self.mid, self.up = Middle(widths[-1], stack.kind), nn.ModuleList()
        for i in range(len(stack.ch_mult)):
            level = Level(widths[i + 1], widths[i], stack.blocks, i in stack.attending, stack.kind)
            if i:
                level.upsample = Upsample(widths[i])
            self.up.append(level)
        self.norm_out, self.conv_out = norm(widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Apply the decoder."""
        z = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            z = level(z)
        return self.conv_out(F.silu(self.norm_out(z)))


def to_uint8(images: Tensor) -> Tensor:
    """Pictures [B, R, R, 3] uint8 of decoder outputs [B, 3, R, R] (LlamaGen's rounding)."""
    return (127.5 * images.float() + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
