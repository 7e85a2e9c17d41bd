"""The maximal coupling of two diagonal Gaussians, in the log domain: keep a draft of q, or draw
what p has more of.

A draft y ~ q is kept with probability min(1, p(y)/q(y)); else y ~ p is proposed until U >
q(y)/p(y), which draws from (p - q)+ / mass. Either way the result has distribution p (Thorisson
2000; for speculation, arXiv 2211.17192). Covariances may differ. The arrays are numpy's: they are a
few hundred numbers, for which its calls cost a fifth of torch's. Shape letters: N rows, C
coordinates, K proposals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specmm.image_ar.continuous.noise import Numbers

Array = npt.NDArray[np.float32]
FIRST_TRIES = 8  # proposals a row gets at first; four times as many in each further turn
MOST_TRIES = 2**20  # beyond these what p has more of is below float32's rounding


@dataclass
class Normal:
    """A diagonal Gaussian: ``mean`` and ``log_var`` [..., C]."""

    mean: Array
    log_var: Array

    def __getitem__(self, where: Any) -> Normal:
        return Normal(self.mean[where], self.log_var[where])

    def energy(self, y: Array) -> Array:
        """-2 log density [..., C] by coordinate, without the constant."""
        off = y - self.mean
        return off * off * np.exp(-self.log_var) + self.log_var

    def sample(self, noise: Array) -> Array:
        """A draw from standard normal ``noise`` [..., C]."""
        return self.mean + np.exp(0.5 * self.log_var) * noise


def log_ratio(p: Normal, q: Normal, y: Array) -> Array:
    """log p(y)/q(y) [...]."""
    ratio: Array = 0.5 * (q.energy(y) - p.energy(y)).sum(-1)
    return ratio


def draw_residual(
    p: Normal, q: Normal, pictures: list[int], batch: int, normal: Numbers, log_uniform: Numbers
) -> Array:
    """Draws [N, C] from (p - q)+ / mass, row n with the numbers of picture ``pictures[n]`` of
    ``batch``.

    Where p and q differ by less than rounding there is no mass to find: after ``MOST_TRIES``
    proposals, which happens with probability below 1e-6, the row is drawn from p. Raises
    ``ValueError`` when a distribution is not finite.
    """
    if not all(np.isfinite(x).all() for x in (p.mean, p.log_var, q.mean, q.log_var)):
        raise ValueError(
            "distributions to couple must be finite, got NaN or infinity in a mean or a log-variance"
        )
    found, left, tries = np.empty_like(p.mean), np.arange(len(pictures)), FIRST_TRIES
    while True:
        counts = counts_by_picture(pictures, batch)
        noise = take(normal, counts, tries * found.shape[1]).reshape(len(left), tries, -1)
        y = p[:, None].sample(noise)  # [N, K, C]
        good = take(log_uniform, counts, tries) > -log_ratio(p[:, None], q[:, None], y)  # [N, K]
        first: npt.NDArray[np.int64] = good.argmax(1)
        hit = np.asarray(good.any(1) | (tries >= MOST_TRIES))
        found[left[hit]] = y[np.arange(len(left)), first][hit]
        if hit.all():
            return found
        left, p, q, tries = left[~hit], p[~hit], q[~hit], min(tries * 4, MOST_TRIES)
        pictures = [b for b, done in zip(pictures, hit.tolist(), strict=True) if not done]


def take(numbers: Numbers, rows: list[int], width: int) -> Array:
    """``numbers.draw`` as an array."""
    drawn: Array = numbers.draw(rows, width).cpu().numpy()
    return drawn


def counts_by_picture(pictures: list[int], batch: int) -> list[int]:
    """How many rows each of ``batch`` pictures has."""
    if batch == 1:
        return [len(pictures)]
    counts = [0] * batch
    for b in pictures:
        counts[b] += 1
    return counts
