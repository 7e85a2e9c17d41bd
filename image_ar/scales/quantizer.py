"""VAR's multi-scale residual quantizer: a picture's features as token grids of growing sides, and
back.

Each scale quantises what the coarser ones left over; its codes are brought to full size and
smoothed by φ before they join the sum f_hat. Source: VAR (arXiv 2404.02905), algorithms 1 and 2.
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
class Quantized:
    """``f_hat`` [B, E, P, P] (straight-through), tokens [B, p²] of each scale, the codebook and
    commitment loss.
    """

    f_hat: Tensor
    tokens: list[Tensor]
    loss: Tensor


def phi_of_scale(shared: int, scales: int) -> list[int]:
    """Which φ each of K = ``scales`` scales uses: of ``shared`` ones, or its own when ``shared`` is
    0.
    """
    if shared == 0:
        return list(range(scales))
    edge = 1 / (3 * shared) if shared == 4 else 1 / (2 * shared)
    ticks = np.linspace(edge, 1 - edge, shared)
    return [int(np.abs(ticks - k / max(scales - 1, 1)).argmin()) for k in range(scales)]


class Smoothers(nn.Module):
    """The φ convolutions under the official names: ``qresi_ls.i`` when several are shared,
    ``qresi`` when one is.
    """

    def __init__(self, width: int, shared: int) -> None:
        super().__init__()
        if shared == 1:
            self.qresi = _smoother(width)
        else:
            self.qresi_ls = nn.ModuleList(_smoother(width) for _ in range(shared))

    def __getitem__(self, i: int) -> nn.Module:
        return self.qresi if hasattr(self, "qresi") else self.qresi_ls[i]


def _smoother(width: int) -> nn.Conv2d:
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
        self.schedule, self.ratio, self.znorm, self.beta = schedule, ratio, znorm, beta
        self.phi = phi_of_scale(shared, len(schedule))
        self.embedding = nn.Embedding(vocab_size, width)
        own = nn.ModuleList(_smoother(width) for _ in schedule.sides)
        self.quant_resi = Smoothers(width, shared) if shared else own
        self.register_buffer("ema_vocab_hit_SV", torch.zeros(len(schedule), vocab_size))

    def codes(self, tokens: Tensor) -> Tensor:
        """Code vectors [B, E, p, p] of a scale's ``tokens`` [B, p²]."""
        side = round(tokens.shape[1] ** 0.5)
        return self.embedding(tokens).transpose(1, 2).unflatten(2, (side, side))

    def smooth(self, codes: Tensor, k: int) -> Tensor:
        """φ of scale ``k``: (1 - r) h + r conv(h)."""
        return torch.lerp(codes, self.quant_resi[self.phi[k]](codes), self.ratio)

    def paint(self, codes: Tensor, k: int) -> Tensor:
        """What ``codes`` [B, E, p, p] of scale ``k`` add to f_hat [B, E, P, P]."""
        return self.smooth(self._resize(codes, self.schedule.sides[-1], "bicubic", k), k)

    def reduce(self, f_hat: Tensor, k: int) -> Tensor:
        """The transformer's inputs [B, p², E] at scale ``k``: f_hat averaged down to its side."""
        return self._resize(f_hat, self.schedule.sides[k], "area", k).flatten(2).transpose(1, 2)

    def _resize(self, x: Tensor, side: int, mode: str, k: int) -> Tensor:
        return x if k == len(self.schedule) - 1 else F.interpolate(x, size=(side, side), mode=mode)

    def nearest(self, rows: Tensor) -> Tensor:
        """Indices [...] of the codes nearest to ``rows`` [..., E]: by distance, or by angle with
        ``znorm``.
        """
        book = self.embedding.weight
        if self.znorm:
            return (F.normalize(rows, dim=-1) @ F.normalize(book, dim=-1).T).argmax(-1)
        return (book.square().sum(1) - 2 * rows @ book.T).argmin(
            -1
        )  # |rows|² is the same for every code

    def forward(self, features: Tensor) -> Quantized:
        """Quantise ``features`` [B, E, P, P] with the gradients and the loss of training (mean over
        the scales).

        In float32 whatever the surroundings: what one scale rounds away the next would have to
        encode.
        """
        with torch.autocast(features.device.type, enabled=False):
            return self._quantise(features.float())

    def _quantise(self, features: Tensor) -> Quantized:
        fixed = features.detach()
        f_hat, tokens, loss = torch.zeros_like(fixed), [], fixed.new_zeros(())
        for k in range(len(self.schedule)):
            tokens.append(self.nearest(self.reduce(fixed - f_hat.detach(), k)))
            f_hat = f_hat + self.paint(self.codes(tokens[k]), k)
            loss = (
                loss + F.mse_loss(f_hat, fixed) + self.beta * F.mse_loss(features, f_hat.detach())
            )
        return Quantized(features + (f_hat - features).detach(), tokens, loss / len(self.schedule))

    def residuals(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scale by scale, what ``features`` [B, E, P, P] have left to quantise [B, p², E], and its
        tokens [B, p²].
        """
        rest = features.float()
        for k in range(len(self.schedule)):
            rows = self.reduce(rest, k)
            tokens = self.nearest(rows)
            yield rows, tokens
            rest = rest - self.paint(self.codes(tokens), k)

    @torch.no_grad()
    def encode(self, features: Tensor) -> list[Tensor]:
        """Tokens [B, p²] of every scale of ``features`` [B, E, P, P]."""
        return [tokens for _, tokens in self.residuals(features)]

    def f_hats(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The sums [B, E, P, P] after each of the scales that ``tokens`` holds."""
        sums: list[Tensor] = []
        for k, part in enumerate(tokens):
            painted = self.paint(self.codes(part), k)
            sums.append(sums[-1] + painted if sums else painted)
        return sums

    def f_hat_by_growth(self, tokens: Sequence[Tensor]) -> Tensor:
        """The release's experimental sum [B, E, P, P], which grows from scale to scale instead of
        being full-size.
        """
        f_hat = self.smooth(self.codes(tokens[0]), 0)
        for k, part in enumerate(tokens[1:], 1):
            side = self.schedule.sides[k]
            f_hat = F.interpolate(f_hat, size=(side, side), mode="bicubic") + self.smooth(
                self.codes(part), k
            )
        return f_hat

    def inputs(self, tokens: Sequence[Tensor]) -> Tensor:
        """The transformer's inputs [B, T, E] at scales 1 … that teacher forcing with ``tokens``
        needs.

        All K scales' tokens give the inputs of scales 1 … K-1; fewer (at least one) give one scale
        more than they are.
        """
        last = len(self.schedule) - 1
        return torch.cat(
            [self.reduce(f, k) for k, f in enumerate(self.f_hats(tokens[:last]), 1)], dim=1
        )
