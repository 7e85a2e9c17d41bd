"""VAR's multi-scale residual quantizer: a picture's features as token grids of growing sides.

Each scale quantises what the coarser ones left over; its codes are resized to full size and
convolved by φ before they are added to f_hat. Source: VAR (arXiv 2404.02905), algorithms 1 and 2.
Shape letters: B batch, E code width, P full latent side, p side of a scale, K scales, V codebook
size, L tokens of all scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.scales.scale_schedule import ScaleSchedule


@dataclass
class QuantizedScales:
    """``f_hat`` [B, E, P, P] (straight-through), tokens [B, p²] by scale, and the VQ loss."""

    f_hat: Tensor
    tokens: list[Tensor]
    loss: Tensor


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

    def __init__(
        self,
        vocab_size: int,
        width: int,
        schedule: ScaleSchedule,
        shared: int,
        ratio: float,
        znorm: bool,
        beta: float,
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self.ratio = ratio
        self.znorm = znorm
        self.beta = beta
        self.phi_of_scale = phi_of_scale(shared, len(schedule))
        self.embedding = nn.Embedding(vocab_size, width)
        own = nn.ModuleList(_conv(width) for _ in schedule.sides)
        self.quant_resi = SharedPhi(width, shared) if shared else own
        self.register_buffer("ema_vocab_hit_SV", torch.zeros(len(schedule), vocab_size))

    def codes(self, tokens: Tensor) -> Tensor:
        """Code vectors [B, E, p, p] of a scale's ``tokens`` [B, p²]."""
        return _as_grid(self.embedding(tokens))

    def soft_codes(self, weights: Tensor) -> Tensor:
        """Mixtures [B, E, p, p] of code vectors by ``weights`` [B, p², V]."""
        return _as_grid(weights @ self.embedding.weight)

    def contribution(self, codes: Tensor, k: int) -> Tensor:
        """What ``codes`` [B, E, p, p] of scale ``k`` add to f_hat [B, E, P, P]: φ_k, upsampled."""
        h = self._resize(codes, self.schedule.sides[-1], "bicubic", k)
        return torch.lerp(h, self.quant_resi[self.phi_of_scale[k]](h), self.ratio)

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

    def forward(self, features: Tensor) -> QuantizedScales:
        """Quantise ``features`` [B, E, P, P] for training; the loss is the mean over scales.

        In float32 whatever autocast says: what one scale rounds away the next has to encode.
        """
        with torch.autocast(features.device.type, enabled=False):
            return self._quantise(features.float())

    def _quantise(self, features: Tensor) -> QuantizedScales:
        fixed = features.detach()
        f_hat = torch.zeros_like(fixed)
        loss = fixed.new_zeros(())
        tokens: list[Tensor] = []
        for k in range(len(self.schedule)):
            tokens.append(self.nearest(self.downsample(fixed - f_hat.detach(), k)))
            f_hat = f_hat + self.contribution(self.codes(tokens[k]), k)
            commitment = self.beta * F.mse_loss(features, f_hat.detach())
            loss = loss + F.mse_loss(f_hat, fixed) + commitment
        straight_through = features + (f_hat - features).detach()
        return QuantizedScales(straight_through, tokens, loss / len(self.schedule))

    def residuals(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """By scale, the residual [B, p², E] of ``features`` [B, E, P, P] and its tokens [B, p²]."""
        rest = features.float()
        for k in range(len(self.schedule)):
            rows = self.downsample(rest, k)
            tokens = self.nearest(rows)
            yield rows, tokens
            rest = rest - self.contribution(self.codes(tokens), k)

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
