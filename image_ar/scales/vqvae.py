"""VAR's image tokenizer: a VQGAN-like autoencoder around a multi-scale residual quantizer.

The quantizer makes token grids of growing sides: each scale quantises what the coarser ones left
over; its codes are resized to full size and convolved by φ before they are added to f_hat. Sources:
VAR (arXiv 2404.02905, algorithms 1 and 2), VQGAN (arXiv 2012.09841); parameter names are the
official ones. Shape letters: B batch, R image side, P full latent side (R / downsampling), p side
of a scale, E code width, C channels, K scales, V codebook size, T tokens of several scales. Images
are float in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.autoencoder import Decoder, Encoder, Stack, norm
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


def phi_of_scale(shared: int, scales: int) -> list[int]:
    """The φ of each of K = ``scales`` scales, out of ``shared`` ones (0: each has its own)."""
    if shared == 0:
        return list(range(scales))
    edge = 1 / (3 * shared) if shared == 4 else 1 / (2 * shared)
    ticks = np.linspace(edge, 1 - edge, shared)
    return [int(np.abs(ticks - k / max(scales - 1, 1)).argmin()) for k in range(scales)]


class SharedPhi(nn.Module):
    """The φ convolutions under the official names: ``qresi_ls.i``, or ``qresi`` for one alone."""

    def __init__(self, width: int, shared: int) -> None:
        super().__init__()
        self.alone = shared == 1
        if self.alone:
            self.qresi = _conv(width)
        else:
            self.qresi_ls = nn.ModuleList(_conv(width) for _ in range(shared))

    def __getitem__(self, i: int) -> nn.Module:
        return self.qresi if self.alone else self.qresi_ls[i]


def _conv(width: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, padding=1)


class MultiScaleQuantizer(nn.Module):
    """The codebook [V, E], the φ convolutions and the official counter of used codes."""

    ema_vocab_hit_SV: Tensor

    def __init__(self, config: VQVAEConfig) -> None:
        super().__init__()
        width = config.z_channels
        shared = config.share_quant_resi
        self.schedule = config.schedule
        self.ratio = config.quant_resi
        self.znorm = config.using_znorm
        self.beta = config.beta
        self.phi_of_scale = phi_of_scale(shared, len(self.schedule))
        self.embedding = nn.Embedding(config.vocab_size, width)
        by_scale = nn.ModuleList(_conv(width) for _ in self.schedule.sides)
        self.quant_resi = SharedPhi(width, shared) if shared else by_scale
        used = torch.zeros(len(self.schedule), config.vocab_size)
        self.register_buffer("ema_vocab_hit_SV", used)

    def codes(self, tokens: Tensor) -> Tensor:
        """Code vectors [B, E, p, p] of a scale's ``tokens`` [B, p²]."""
        return _as_grid(self.embedding(tokens))

    def soft_codes(self, weights: Tensor) -> Tensor:
        """Mixtures [B, E, p, p] of code vectors by ``weights`` [B, p², V]."""
        return _as_grid(weights @ self.embedding.weight)

    def contribution(self, codes: Tensor, k: int) -> Tensor:
        """Summand [B, E, P, P] of scale ``k``: ``codes`` [B, E, p, p] upsampled, then φ_k."""
        h = self._resize(codes, self.schedule.sides[-1], "bicubic", k)
        refined = self.quant_resi[self.phi_of_scale[k]](h).to(h)  # autocast has another dtype
        return torch.lerp(h, refined, self.ratio)

    def downsample(self, f_hat: Tensor, k: int) -> Tensor:
        """The transformer's inputs [B, p², E] at scale ``k``: f_hat averaged down to its side."""
        return self._resize(f_hat, self.schedule.sides[k], "area", k).flatten(2).transpose(1, 2)

    def _resize(self, x: Tensor, side: int, mode: str, k: int) -> Tensor:
        return x if k == len(self.schedule) - 1 else F.interpolate(x, size=(side, side), mode=mode)

    def nearest(self, rows: Tensor) -> Tensor:
        """Codes [...] nearest to ``rows`` [..., E]: by distance, or by angle with ``znorm``."""
        book = self.embedding.weight
        if self.znorm:
            return (F.normalize(rows, dim=-1) @ F.normalize(book, dim=-1).T).argmax(-1)
        # |rows|² is the same for every code
        return (book.square().sum(1) - 2 * rows @ book.T).argmin(-1)

    def residuals(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """By scale, the residual [B, p², E] of ``features`` [B, E, P, P] and its tokens [B, p²]."""
        residual = features.float()
        for k in range(len(self.schedule)):
            rows = self.downsample(residual, k)
            tokens = self.nearest(rows)
            yield rows, tokens
            residual = residual - self.contribution(self.codes(tokens), k)

    @torch.no_grad()
    def encode(self, features: Tensor) -> list[Tensor]:
        """Tokens [B, p²] of every scale of ``features`` [B, E, P, P]."""
        return [tokens for _, tokens in self.residuals(features)]

    def f_hats(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """f_hat [B, E, P, P] after each of the scales that ``tokens`` holds."""
        sums: list[Tensor] = []
        for k, part in enumerate(tokens):
            added = self.contribution(self.codes(part), k)
            sums.append(sums[-1] + added if sums else added)
        return sums

    def inputs(self, tokens: Sequence[Tensor]) -> Tensor:
        """Inputs [B, T, E] of scales 1 … for teacher forcing with ``tokens``.

        All K scales' tokens give the inputs of scales 1 … K-1; fewer (at least one) give one scale
        more than they are.
        """
        sums = self.f_hats(tokens[: len(self.schedule) - 1])
        return torch.cat([self.downsample(f_hat, k) for k, f_hat in enumerate(sums, 1)], dim=1)


def _as_grid(rows: Tensor) -> Tensor:
    side = round(rows.shape[1] ** 0.5)
    return rows.transpose(1, 2).unflatten(2, (side, side))


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
        self.quantize = MultiScaleQuantizer(config)
        kernel = config.quant_conv_ks
        self.quant_conv = nn.Conv2d(width, width, kernel, padding=kernel // 2)
        self.post_quant_conv = nn.Conv2d(width, width, kernel, padding=kernel // 2)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.post_quant_conv.weight.dtype

    def features(self, images: Tensor) -> Tensor:
        """Features [B, E, P, P] of images [B, 3, R, R], before quantisation."""
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
