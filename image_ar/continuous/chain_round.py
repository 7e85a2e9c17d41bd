"""What a round of speculation along a denoising chain computes: drafts, the target's distributions,
which drafts are kept, and what is drawn in the place of a rejected one.

Functions of numpy's arrays on the host, and of tensors in a program; see
:mod:`specmm.image_ar.continuous.chain_speculation` for the parameter η and shape letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from specmm.image_ar.continuous.chain_windows import Array, Columns, Response, library
from specmm.image_ar.continuous.orders import Stream

Mask: TypeAlias = Any  # flags, of numpy or torch

WIDEST = 80.0  # beyond this float32 has no such variance
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
        return off * off * library(off).exp(-self.log_var) + self.log_var

    def sample(self, noise: Array) -> Array:
        """A draw from standard normal ``noise`` [..., C]."""
        return self.mean + library(noise).exp(0.5 * self.log_var) * noise


def log_ratio(p: Normal, q: Normal, y: Array) -> Array:
    """log p(y)/q(y) [...]."""
    ratio: Array = 0.5 * (q.energy(y) - p.energy(y)).sum(-1)
    return ratio


@dataclass
class ChainOptions:
    """How to speculate; without ``residual`` the output is wrong: the tests' broken twin."""

    temperature: float = 1.0
    residual: bool = True


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


class ChainRows(NamedTuple):
    """Rows at steps ``k``, with their state and response."""

    k: list[int]
    state: RowState
    response: Response


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
    state: RowState, shares: Array, columns: Columns, noise: Array, log_temperature: float | Array
) -> Drafts:
    """By the prediction N(m, V · ``shares``), from ``noise`` [R, W, C] that has the temperature;
    ``log_temperature`` is that of variances.
    """
    eta, own_mean, own_var = state
    lib = library(eta)
    var = own_var * shares
    snr = columns.snr[:, :-1]
    clean = own_mean + lib.sqrt(var) * noise[:, 0]
    steps = clean[:, None] + columns.root[:, 1:-1] * noise[:, 1:]
    sums = lib.cumsum(columns.gain[:, 1:-1] * steps, axis=1)
    moved = lib.concatenate([lib.zeros_like(noise[:, :1]), sums], axis=1)
    surer = 1 + var[:, None] * (snr - snr[:, :1])  # [R, W, C]
    mean = (own_mean[:, None] + var[:, None] * moved[:, :-1]) / surer[:, :-1]
    log_gain = columns.log_gain[:, 1:-1] + log_temperature
    log_var = lib.log(surer[:, 1:] / surer[:, :-1]) + log_gain
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


def predicted(clean: Array, step: Array, gain: Array, excess: Any) -> tuple[Array, Array]:
    """The drafter's N(m, V) after a ``step`` [R, C] of ``gain``, where the target predicted
    ``clean`` with Δ·Var(x0) = ``excess``.
    """
    surer = 1 + excess
    return (clean + excess * step) / surer, excess / (gain * surer)


def draw_residual(
    p: Normal, q: Normal, pictures: list[int], batch: int, normal: Stream, log_uniform: Stream
) -> Array:
    """Draws [N, C] from (p - q)+ / mass, row n by the streams of picture ``pictures[n]``.

    Where p and q differ by less than rounding there is no mass to find: after ``MOST_TRIES``
    proposals, which happens with probability below 1e-6, the row is drawn from p. Raises
    ``ValueError`` when a distribution is not finite.
    """
    if not np.isfinite(sum(x.sum() for x in (p.mean, p.log_var, q.mean, q.log_var))):
        raise ValueError(
            "distributions to couple must be finite, "
            "got NaN or infinity in a mean or a log-variance"
        )
    found = np.empty_like(p.mean)
    left = np.arange(len(pictures))
    tries = FIRST_TRIES
    while True:
        counts = counts_of(pictures, batch)
        noise = take(normal, counts, tries * found.shape[1]).reshape(len(left), tries, -1)
        y = p[:, None].sample(noise)  # [N, K, C]
        good = take(log_uniform, counts, tries) > -log_ratio(p[:, None], q[:, None], y)  # [N, K]
        first: npt.NDArray[np.int64] = good.argmax(1)
        hit = np.asarray(good.any(1) | (tries >= MOST_TRIES))
        found[left[hit]] = y[np.arange(len(left)), first][hit]
        if hit.all():
            return found
        left = left[~hit]
        p = p[~hit]
        q = q[~hit]
        tries = min(tries * 4, MOST_TRIES)
        pictures = [b for b, done in zip(pictures, hit.tolist(), strict=True) if not done]


def take(stream: Stream, rows: list[int], width: int) -> Array:
    """``stream.draw`` as an array."""
    drawn: Array = stream.draw(rows, width).cpu().numpy()
    return drawn


def counts_of(pictures: list[int], batch: int) -> list[int]:
    """How many rows each of ``batch`` pictures has."""
    if batch == 1:
        return [len(pictures)]
    counts: list[int] = np.bincount(pictures, minlength=batch).tolist()
    return counts
