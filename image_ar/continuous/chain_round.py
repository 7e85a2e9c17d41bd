"""One round of speculation along denoising chains: a window of steps is drafted, the head predicts
at all of its points, and the steps that a coupling accepts are taken.

:func:`play_round` is the only implementation. It takes numpy arrays when the host runs rounds one
by one (:mod:`specmm.image_ar.continuous.chain_speculation`, which also defines η and the shape
letters), and tensors in a program (:mod:`specmm.image_ar.continuous.chain_program`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from specmm.image_ar.continuous.chain_windows import Array, Columns, Response, arange, clamped
from specmm.image_ar.continuous.chain_windows import library as of

Mask: TypeAlias = Any  # flags, of numpy or torch

WIDEST = 80.0  # beyond this float32 has no such variance
# Proposals that a row gets in each turn of a residual. After them all what p has more of than q is
# below float32's rounding (with probability below 1e-6 it is not), and the row is drawn from p.
TURNS = (*(8 * 4**turn for turn in range(9)), 2**20)


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
        return off * off * of(off).exp(-self.log_var) + self.log_var

    def sample(self, noise: Array) -> Array:
        """A draw from standard normal ``noise`` [..., C]."""
        return self.mean + of(noise).exp(0.5 * self.log_var) * noise


def log_ratio(p: Normal, q: Normal, y: Array) -> Array:
    """log p(y)/q(y) [...]."""
    ratio: Array = 0.5 * (q.energy(y) - p.energy(y)).sum(-1)
    return ratio


class ChainRows(NamedTuple):
    """State of the rows before a round: the step ``k`` [R] int64 (S: finished), the head ``calls``
    [R] so far, ``eta`` [R, C] (of a finished row: its token), the drafter's N(mean, var) of x0 [R,
    C], and the fields of ``Response`` [R].
    """

    k: Array
    calls: Array
    eta: Array
    mean: Array
    var: Array
    seen: Array  # of ``Response``, as ``implied``
    implied: Array


class Numbers(Protocol):
    """Source of a round's random numbers. ``rows`` [R] flags the rows that need some; None: all.

    Numbers are drawn row by row for the rows of :meth:`chosen`. ``turns``: how many proposals a
    residual makes in each turn.
    """

    turns: tuple[int, ...]

    def normals(self, rows: Mask | None, count: int) -> Array:
        """``count`` normal numbers for each of ``rows``."""

    def log_uniforms(self, rows: Mask | None, count: int) -> Array:
        """``count`` logarithms of uniforms for each of ``rows``."""

    def chosen(self, rows: Mask) -> Any:
        """An index that selects ``rows``, and perhaps more rows."""

    def needed(self, rows: Mask) -> bool:
        """Whether any of ``rows`` is set; True if the host does not know."""


class Chain(Protocol):
    """The head's chains of S ``steps``, and the speculation on them: windows of ``window`` points,
    and a ``temperature``, whose effect on variances has the log ``log_temperature``.
    """

    steps: int
    window: int
    temperature: Any
    log_temperature: Any

    def columns(self, k: Array) -> Columns:
        """The columns of windows that begin at ``k`` [R]; they have at least two points."""

    def answers(self, k: Array, x: Array) -> tuple[Array, Array]:
        """The head's (eps, v) [R, W, C] for ``x`` [R, W, C] at the steps from ``k`` [R] on."""

    def look(self, p: Normal, wider: Array, k: Array) -> None:
        """Check the target's distributions ``p``; see :func:`target_probs`."""

    def lack(self, lost: Mask) -> None:
        """Note the rows ``lost`` [R] whose residual needs more proposals."""


class Drafts(NamedTuple):
    """A window: ``points`` η [R, W, C], ``steps`` w [R, W-1, C] between, their distributions q."""

    points: Array
    steps: Array
    q: Normal


def play_round(chain: Chain, rows: ChainRows, numbers: Numbers) -> ChainRows:
    """The state of ``rows`` after one round; finished rows are ignored."""
    k, calls, eta, *_ = rows
    response = Response(rows.seen, rows.implied)
    columns = chain.columns(k)
    drafted = columns.snr.shape[1] - 2
    count, channels = eta.shape
    noise = numbers.normals(None, chain.window * channels).reshape(count, -1, channels)
    noise = noise[:, : drafted + 1] * chain.temperature
    log_u = numbers.log_uniforms(None, chain.window - 1)[:, :drafted]
    drafts = draft(rows, response.shares(), columns, noise, chain.log_temperature)
    eps, v = chain.answers(k, drafts.points * columns.to_x[:, :-1])
    p, wider = target_probs(drafts.points, eps, v, columns, chain.log_temperature)
    chain.look(p, wider, k)

    # written so that NaN counts as rejected
    rejected = ~(log_u < log_ratio(p[:, :-1], drafts.q, drafts.steps))
    limit = clamped(chain.steps - 1 - k, high=drafted)  # drafts that are not beyond the last point
    kept = of(k).minimum(first_of(rejected), limit)
    row = arange(count, k)
    probs = p[row, kept]
    step = probs.sample(numbers.normals(None, channels))
    lost = kept < limit
    if numbers.needed(lost):
        over = drafts.q[row, clamped(kept, 0, drafted - 1)]
        draw_residual(probs, over, step, lost, numbers)
        chain.lack(lost)

    clean = probs.mean
    out = columns.gain[row if len(columns.gain) > 1 else 0, kept + 1]
    excess = clamped(of(wider).expm1(wider), 0.0)  # Δ·Var(x0) by the target
    response = response.after(columns.seen[:, 1:-1], drafts.steps, p.mean, excess)
    mean, var = predicted(clean, step, out, excess[row, kept])
    moved = drafts.points[row, kept] + out * step
    last = k + kept == chain.steps - 1  # the last step adds no noise
    eta = of(eta).where(last[:, None], clean, moved)
    return ChainRows(k + kept + 1, calls + 1, eta, mean, var, *response)


def draft(
    rows: ChainRows, shares: Array, columns: Columns, noise: Array, log_temperature: float | Array
) -> Drafts:
    """Draft windows from the prediction N(m, V · ``shares``) with ``noise`` [R, W, C], to which the
    temperature was applied; ``log_temperature`` is the log of its effect on variances.
    """
    lib = of(noise)
    var = rows.var * shares
    snr = columns.snr[:, :-1]
    clean = rows.mean + lib.sqrt(var) * noise[:, 0]
    steps = clean[:, None] + columns.root[:, 1:-1] * noise[:, 1:]
    sums = lib.cumsum(columns.gain[:, 1:-1] * steps, axis=1)
    moved = lib.concatenate([lib.zeros_like(noise[:, :1]), sums], axis=1)
    surer = 1 + var[:, None] * (snr - snr[:, :1])  # [R, W, C]
    mean = (rows.mean[:, None] + var[:, None] * moved[:, :-1]) / surer[:, :-1]
    log_gain = columns.log_gain[:, 1:-1] + log_temperature
    log_var = lib.log(surer[:, 1:] / surer[:, :-1]) + log_gain
    return Drafts(rows.eta[:, None] + moved, steps, Normal(mean, log_var))


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


def predicted(clean: Array, step: Array, gain: Array, excess: Any) -> tuple[Array, Array]:
    """The drafter's N(m, V) after a ``step`` [R, C] of ``gain``, from the target's prediction
    ``clean`` with Δ·Var(x0) = ``excess``.
    """
    surer = 1 + excess
    return (clean + excess * step) / surer, excess / (gain * surer)


def draw_residual(p: Normal, q: Normal, step: Array, lost: Mask, numbers: Numbers) -> None:
    """For the rows flagged ``lost`` [R], write draws from (p - q)+ / mass to ``step`` [R, C] and
    clear their flags. Rows that ran out of proposals stay flagged.
    """
    width = step.shape[1]
    for tries in numbers.turns:
        at = numbers.chosen(lost)
        p_mean, q_mean = p[at][:, None], q[at][:, None]
        y = p_mean.sample(numbers.normals(lost, tries * width).reshape(-1, tries, width))
        good = numbers.log_uniforms(lost, tries) > -log_ratio(p_mean, q_mean, y)  # [N, K]
        first = first_of(good)
        hit = lost[at] & ((first < tries) | (tries == TURNS[-1]))
        residual = y[arange(len(y), first), clamped(first, 0, tries - 1)]
        step[at] = of(y).where(hit[:, None], residual, step[at])
        lost[at] = lost[at] & ~hit
        if not numbers.needed(lost):
            break


def first_of(flags: Mask) -> Array:
    """The number [R] of False before the first True in each row of ``flags`` [R, N]."""
    count = flags.shape[1]
    if isinstance(flags, Tensor):
        return torch.where(flags, arange(count, flags), count).amin(1)
    return np.where(flags.any(1), flags.argmax(1), count)  # in half the time
