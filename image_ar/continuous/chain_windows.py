"""Windows of a denoising chain: constants by step, and how far predictions follow the steps.

In the natural parameter η of :mod:`specmm.image_ar.continuous.chain_speculation`. Shape letters: R
rows (tokens), S steps, W points of a window, C token width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from specmm.image_ar.continuous.diffusion import NoiseSchedule

Array: TypeAlias = Any  # float32 numbers: numpy's on the host, tensors in a program

FORGET = 0.5  # a window's weight in a response decays by this with each later window
STRONGEST = 2.0  # largest response used


def library(x: Array) -> Any:
    """The module with the functions of ``x``: numpy, or torch."""
    return torch if isinstance(x, Tensor) else np


def arange(count: int, where: Array) -> Array:
    """0 to ``count`` - 1, as an array or tensor like ``where`` and on its device."""
    if isinstance(where, Tensor):
        return torch.arange(count, device=where.device)
    return np.arange(count)


def clamped(x: Array, low: float | None = None, high: float | None = None) -> Array:
    """``x`` not below ``low`` nor above ``high``."""
    if isinstance(x, Tensor):
        return x.clamp(low, high)
    x = x if low is None else np.maximum(x, low)  # np.clip takes four times as long
    return x if high is None else np.minimum(x, high)


class Columns(NamedTuple):
    """Numbers [R or 1, W + 1, 1] of the points of a window.

    The step *into* a point has the gain Δ, ``root`` = Δ^-½ and ``log_gain`` = log 1/Δ (all for
    temperature 1), and ``seen`` is Δ, but 0 beyond the last point; ``to_x`` turns η into x; x0 =
    ``x_share``·η - ``eps_share``·eps; ``spread`` is half the log of the learned variance's range in
    the step *out*.
    """

    snr: Array
    gain: Array
    root: Array
    log_gain: Array
    to_x: Array
    x_share: Array
    eps_share: Array
    spread: Array
    seen: Array


class WindowTables:
    """``Columns`` of all S points and, for windows that reach beyond, W times the last one."""

    def __init__(self, schedule: NoiseSchedule, window: int) -> None:
        level = schedule.alphas_cumprod.flip(0).numpy()
        rest = 1 - level
        snr = level / rest
        gain = np.diff(snr, prepend=0.0)
        low = schedule.posterior_log_variance_clipped.flip(0)
        spread = (schedule.betas.log().flip(0) - low).numpy() / 2
        shares = [rest / np.sqrt(level), rest / level, np.sqrt(rest / level)]
        table = np.stack([snr, gain, gain**-0.5, -np.log(gain), *shares, spread], axis=1)
        padded = np.concatenate([table, table[-1:].repeat(window, 0)])
        gains = np.concatenate([gain, np.zeros(window)])
        self.rows = np.column_stack([padded, gains]).astype(np.float32)[:, :, None]  # [S + W, 9, 1]
        self.steps = len(level)
        self.window = window
        self.made: dict[tuple[int, int], Columns] = {}  # for rows that are all at one step

    def at(self, k: Array, width: int) -> Columns:
        """The columns for windows of ``width`` points that start at steps ``k`` [R]."""
        first = int(k[0])
        if len(k) > 1 and (k != first).any():
            return columns_of(self.rows[k[:, None] + np.arange(width + 1)])
        key = (first, width)
        if key not in self.made:
            self.made[key] = columns_of(self.rows[None, first : first + width + 1])
        return self.made[key]


def columns_of(rows: Array) -> Columns:
    """The columns of table ``rows`` [R or 1, W + 1, 9, 1]."""
    return Columns(*(rows[:, :, i] for i in range(rows.shape[2])))


def _total(x: Array) -> Array:
    """The sums [R] of ``x`` [R, W, C], added in an order in which trailing zeros change no bit: the
    width of a window depends on the other rows of the batch.
    """
    return library(x).cumsum(x.sum(-1), axis=1)[:, -1]


class Response(NamedTuple):
    """How far predictions of x0 followed the steps of their windows, as a share of the movement
    that the predicted variances imply: one share a row, averaged with more weight on newer windows.

    In η the derivative of E[x0] is Var(x0) (Tweedie's formula), so after a step w the prediction m'
    differs from m by V·Δ·(w - m'), if V is the variance. The share is the least-squares fit, in
    units of V, over all points of a window, including points after the first rejection, which the
    target also scored. It depends only on earlier rounds, so drafts stay exact for any share.
    """

    seen: Array  # [R], the movement that was seen; 1 at first, as ``implied``
    implied: Array  # [R], the movement that variances imply: the share is seen / implied

    def after(self, gain: Array, steps: Array, clean: Array, excess: Array) -> Response:
        """The response updated by a window: ``clean`` [R, W, C] predictions, ``excess``
        = Δ·Var(x0), and the ``steps`` between [R, W-1, C] of ``gain`` [R or 1, W-1, 1] (0: none).
        """
        after = clean[:, 1:]
        off = steps - after
        pull = gain * off
        return Response(
            FORGET * self.seen + _total(pull * (after - clean[:, :-1])),
            FORGET * self.implied + _total(pull * off * excess[:, :-1]),
        )

    def shares(self) -> Array:
        """[R, 1], at most ``STRONGEST``."""
        return clamped(self.seen / self.implied, 0.0, STRONGEST)[:, None]
