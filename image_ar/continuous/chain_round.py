"""What a round of speculation along a denoising chain computes: drafts, the target's distributions,
and which drafts are kept.

Functions of arrays alone, so that a program can be made of them; see
:mod:`specmm.image_ar.continuous.chain_speculation` for the parameter η and shape letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specmm.image_ar.continuous.chain_windows import Columns

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


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


class Drafts(NamedTuple):
    """A window: ``points`` η [R, W, C], ``steps`` w [R, W-1, C] between, their distributions q."""

    points: Array
    steps: Array
    q: Normal


class RowState(NamedTuple):
    """Rows as a round begins: their ``eta``, and the drafter's N(mean, var) of x0, [R, C] each."""

    eta: Array
    mean: Array
    var: Array


class Verified(NamedTuple):
    """A window's ``drafts``, the target's distributions ``p`` of the steps out of its points
    [R, W, C], the log of how much ``wider`` they are than 1/Δ, and which drafts are ``rejected``
    [R, W-1].
    """

    drafts: Drafts
    p: Normal
    wider: Array
    rejected: Mask


def draft(
    state: RowState, columns: Columns, noise: Array, log_temperature: float | Array
) -> Drafts:
    """By the prediction N(m, V), from ``noise`` [R, W, C]; ``log_temperature`` is of variances."""
    eta, own_mean, var = state
    snr = columns.snr[:, :-1]
    clean = own_mean + np.sqrt(var) * noise[:, 0]
    steps = clean[:, None] + columns.root[:, 1:-1] * noise[:, 1:]
    moved = np.zeros_like(noise)
    np.cumsum(columns.gain[:, 1:-1] * steps, axis=1, out=moved[:, 1:])
    surer = 1 + var[:, None] * (snr - snr[:, :1])  # [R, W, C]
    mean = (own_mean[:, None] + var[:, None] * moved[:, :-1]) / surer[:, :-1]
    log_gain = columns.log_gain[:, 1:-1] + log_temperature
    log_var = np.log(surer[:, 1:] / surer[:, :-1]) + log_gain
    return Drafts(eta[:, None] + moved, steps, Normal(mean, log_var))


def target_probs(
    points: Array, eps: Array, v: Array, columns: Columns, log_temperature: float | Array
) -> tuple[Normal, Array]:
    """Distributions of the steps out of ``points`` [R, W, C] by the head's answers ``eps`` and
    ``v``, and the log of how much wider they are than 1/Δ.
    """
    wider: Array = columns.spread[:, :-1] * (v + 1)
    clean: Array = points * columns.x_share[:, :-1] - eps * columns.eps_share[:, :-1]
    log_var = wider + (columns.log_gain[:, 1:] + log_temperature)
    return Normal(clean, log_var), wider


def rejections(drafts: Drafts, p: Normal, log_u: Array) -> Mask:
    """Which drafted steps a maximal coupling would not keep [R, W-1], by ``log_u`` [R, W-1]."""
    _, steps, q = drafts
    # written so that NaN counts as rejected, and raises when the residual is drawn
    rejected: Mask = ~(log_u < log_ratio(p[:, :-1], q, steps))
    return rejected
