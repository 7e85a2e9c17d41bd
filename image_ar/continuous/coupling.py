"""The maximal coupling of two diagonal Gaussians, in the log domain: keep a draft of q, or draw what p has more of.

A draft y ~ q is kept with probability min(1, p(y)/q(y)); else y ~ p is proposed until U > q(y)/p(y), which draws from
(p - q)+ / mass. Either way the result has law p (Thorisson 2000; for speculation, arXiv 2211.17192). Covariances may
differ. Shape letters: N rows, C coordinates, K proposals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.image_ar.continuous.noise import Numbers

FIRST_TRIES = 4  # proposals a row gets at first; four times as many in each further turn
MOST_TRIES = 2**20  # beyond these what p has more of is below float32's rounding


@dataclass
class Normal:
    """A diagonal Gaussian: ``mean`` and ``log_var`` [..., C]."""

    mean: Tensor
    log_var: Tensor

    def __getitem__(self, where: Tensor | tuple[Tensor, Tensor]) -> Normal:
        return Normal(self.mean[where], self.log_var[where])

    def energy(self, y: Tensor) -> Tensor:
        """-2 log density [..., C] by coordinate, without the constant."""
        return (y - self.mean).square_().mul_(torch.exp(-self.log_var)).add_(self.log_var)

    def sample(self, noise: Tensor) -> Tensor:
        """A draw from standard normal ``noise`` [..., C]."""
        return torch.addcmul(self.mean, torch.exp(0.5 * self.log_var), noise)


def log_ratio(p: Normal, q: Normal, y: Tensor) -> Tensor:
    """log p(y)/q(y) [...]."""
    return (q.energy(y) - p.energy(y)).sum(-1).mul_(0.5)


def draw_residual(
    p: Normal, q: Normal, pictures: list[int], batch: int, normal: Numbers, log_uniform: Numbers
) -> Tensor:
    """Draws [N, C] from (p - q)+ / mass, row n with the numbers of picture ``pictures[n]`` of ``batch``.

    Where p and q differ by less than rounding there is no mass to find: after ``MOST_TRIES`` proposals, which happens
    with probability below 1e-6, the row is drawn from p. Raises ``ValueError`` when a law is not finite.
    """
    if not bool((p.mean + p.log_var + q.mean + q.log_var).isfinite().all()):
        raise ValueError("laws to couple must be finite, got NaN or infinity in a mean or a log-variance")
    found, left, tries = torch.empty_like(p.mean), torch.arange(len(pictures), device=p.mean.device), FIRST_TRIES
    while True:
        counts = counts_by_picture(pictures, batch)
        width = found.shape[1]
        noise = normal.draw(counts, tries * width).view(-1, tries, width)
        at, over = Normal(p.mean[:, None], p.log_var[:, None]), Normal(q.mean[:, None], q.log_var[:, None])
        y = at.sample(noise)  # [N, K, C]
        good = log_uniform.draw(counts, tries) > -log_ratio(at, over, y)  # [N, K]
        first = good.to(torch.int8).argmax(1)  # the first good one, or 0
        hit, rows = good.any(1), torch.arange(len(left), device=left.device)
        if tries >= MOST_TRIES:
            hit = torch.ones_like(hit)
        found[left[hit]] = y[rows, first][hit]
        if bool(hit.all()):
            return found
        miss = (~hit).nonzero()[:, 0]
        left, p, q = left[miss], p[miss], q[miss]
        pictures, tries = [pictures[i] for i in miss.tolist()], min(tries * 4, MOST_TRIES)


def counts_by_picture(pictures: list[int], batch: int) -> list[int]:
    """How many rows each of ``batch`` pictures has."""
    counts = [0] * batch
    for b in pictures:
        counts[b] += 1
    return counts
