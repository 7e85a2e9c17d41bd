"""Exact speculation along a token's denoising chain: one head call verifies a window of steps.

Source: speculation on a diffusion chain (De Bortoli et al. 2025, arXiv 2501.05370), with the
generic maximal coupling, since MAR's learned variances differ from a drafter's. Three things differ
from the paper. The chain is run in its natural parameter η = √ᾱ x / (1 - ᾱ), in which every step
adds Δ·w, where Δ is the gain in signal-to-noise ratio and w ~ N(x0, 1/Δ) if the clean token is x0:
w is "what the step believes x0 to be", and it is w that is drafted and verified. The drafter holds
a Gaussian prediction N(m, V) of x0, so a whole window is drawn at once and its distribution is
known in closed form. And V comes with the target's last prediction, for free: a learned variance
above the posterior's is Δ²·Var(x0) in η, which makes the drafts bend as the target's predictions do
instead of repeating the last one.

The maximal coupling of two diagonal Gaussians: a draft y ~ q is kept with probability min(1,
p(y)/q(y)); else y ~ p is proposed until U > q(y)/p(y), which draws from (p - q)+ / mass. Either way
the result has distribution p (Thorisson 2000; for speculation, arXiv 2211.17192).

All of this is a few hundred numbers a round, kept in numpy on the host, where a call costs a fifth
of torch's; only the head runs where it is. Shape letters: R rows (tokens) still running, S steps, W
points of a window, C token width, N rows and K proposals of a coupling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specmm.image_ar.continuous.diffusion import NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import BoundHead, ChainHead, HeadCondition, finite
from specmm.image_ar.continuous.masked_decode import View
from specmm.image_ar.continuous.orders import Stream

Predictor = Literal["gaussian", "frozen", "small"]
Array = npt.NDArray[np.float32]

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
        return off * off * np.exp(-self.log_var) + self.log_var

    def sample(self, noise: Array) -> Array:
        """A draw from standard normal ``noise`` [..., C]."""
        return self.mean + np.exp(0.5 * self.log_var) * noise


def log_ratio(p: Normal, q: Normal, y: Array) -> Array:
    """log p(y)/q(y) [...]."""
    ratio: Array = 0.5 * (q.energy(y) - p.energy(y)).sum(-1)
    return ratio


def draw_residual(
    p: Normal, q: Normal, pictures: list[int], batch: int, normal: Stream, log_uniform: Stream
) -> Array:
    """Draws [N, C] from (p - q)+ / mass, row n by the streams of picture ``pictures[n]``.

    Where p and q differ by less than rounding there is no mass to find: after ``MOST_TRIES``
    proposals, which happens with probability below 1e-6, the row is drawn from p. Raises
    ``ValueError`` when a distribution is not finite.
    """
    if not all(np.isfinite(x).all() for x in (p.mean, p.log_var, q.mean, q.log_var)):
        raise ValueError(
            "distributions to couple must be finite, "
            "got NaN or infinity in a mean or a log-variance"
        )
    found = np.empty_like(p.mean)
    left = np.arange(len(pictures))
    tries = FIRST_TRIES
    while True:
        counts = _counts(pictures, batch)
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


def _counts(pictures: list[int], batch: int) -> list[int]:
    """How many rows each of ``batch`` pictures has."""
    if batch == 1:
        return [len(pictures)]
    counts: list[int] = np.bincount(pictures, minlength=batch).tolist()
    return counts


@dataclass
class Columns:
    """Numbers [R or 1, W + 1, 1] of the points of a window.

    The step *into* a point has the gain Δ, ``root`` = Δ^-½ and ``log_gain`` = log 1/Δ (all for
    temperature 1); ``to_x`` turns η into x; x0 = ``x_share``·η - ``eps_share``·eps; ``spread`` is
    half the log of the learned variance's range in the step *out*.
    """

    snr: Array
    gain: Array
    root: Array
    log_gain: Array
    to_x: Array
    x_share: Array
    eps_share: Array
    spread: Array

    def pair(self, j: int) -> Columns:
        """Points j and j + 1."""
        return Columns(*(column[:, j : j + 2] for column in vars(self).values()))


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
        self.rows = padded.astype(np.float32)[:, :, None]  # [S + W, 8, 1]
        self.steps = len(level)
        self.window = window

    def at(self, k: list[int], width: int) -> Columns:
        """The columns for windows of ``width`` points that start at steps ``k`` [R]."""
        if len(set(k)) == 1:
            rows = self.rows[None, k[0] : k[0] + width + 1]
        else:
            rows = self.rows[np.array(k)[:, None] + np.arange(width + 1)]
        return Columns(*(rows[:, :, i] for i in range(rows.shape[2])))


@dataclass
class Speculated:
    """Finished tokens [R, C], the head calls each took part in [R], and sequential ``calls``."""

    tokens: Tensor
    row_calls: list[int]
    calls: int


@dataclass
class ChainOptions:
    """How to speculate; without ``residual`` the output is wrong: the tests' broken twin."""

    temperature: float = 1.0
    predictor: Predictor = "gaussian"
    residual: bool = True


@torch.inference_mode()
def speculate(
    bound: BoundHead,
    tables: WindowTables,
    rows: list[int],
    normal: Stream,
    log_uniform: Stream,
    options: ChainOptions | None = None,
    small: BoundHead | None = None,
) -> Speculated:
    """Tokens [R, C] with the distribution of ``ancestral``, in fewer sequential head calls.

    ``rows[b]`` of the R tokens belong to picture b and use its streams. ``small`` is a smaller
    model's head, bound to the same tokens: it then drafts, step by step. Raises ``ValueError`` when
    a chain leaves the finite numbers, and for a temperature that is not above 0: such a chain has
    no distributions to couple.
    """
    options = options or ChainOptions()
    if options.temperature <= 0:
        raise ValueError(
            f"temperature must be above 0 to speculate, got {options.temperature}: "
            "run the chain plainly"
        )
    run = _ChainRun(bound, tables, rows, normal, log_uniform, options, small)
    while run.left:
        run.round()
    return Speculated(finite(torch.from_numpy(run.tokens).to(run.device)), run.row_calls, run.calls)


class _ChainRun:
    """The rounds of one ``speculate``: rows still running (``left``), their η, step and N(m, V)."""

    def __init__(
        self,
        bound: BoundHead,
        tables: WindowTables,
        rows: list[int],
        normal: Stream,
        log_uniform: Stream,
        options: ChainOptions,
        small: BoundHead | None,
    ) -> None:
        self.bound = bound
        self.tables = tables
        self.options = options
        self.small = small
        self.normal = normal
        self.log_uniform = log_uniform
        self.batch = len(rows)
        self.log_temperature = 2 * math.log(options.temperature)  # of variances
        self.device = bound.head.device
        self.eta = take(normal, rows, bound.head.channels) / tables.rows[0, 4]
        self.mean = np.zeros_like(self.eta)
        self.var = np.ones_like(self.eta)  # latents have unit variance
        self.k = [0] * len(bound)
        self.pictures = [b for b, n in enumerate(rows) for _ in range(n)]
        self.left = list(range(len(bound)))
        self.tokens = np.empty_like(self.eta)
        self.calls = 0
        self.row_calls = [0] * len(bound)

    def round(self) -> None:
        """Draft, one head call, accept; rows that are finished leave."""
        width = min(self.tables.window, self.tables.steps - min(self.k))
        columns = self.tables.at(self.k, width)
        noise = self._numbers(self.normal, self.tables.window * self.eta.shape[1])
        noise = noise.reshape(len(self.left), -1, self.eta.shape[1])[:, :width]
        if self.small is None:
            points, steps, q = self._draft(columns, noise)
        else:
            points, steps, q = self._draft_by(self.small, columns, noise)
        self.calls += 1
        for row in self.left:
            self.row_calls[row] += 1
        p, wider = self._probs(self.bound, self.k, points, columns)
        kept = self._accept(steps, p, q)
        last = self.tables.steps - 1
        finished = [i for i, k in enumerate(self.k) if k + kept[i] == last]
        self._advance(points, p, wider, q, columns.gain, kept)
        if finished:
            self._finish(finished, p.mean, kept)

    def _draft(self, columns: Columns, noise: Array) -> tuple[Array, Array, Normal]:
        """By the prediction N(m, V), from ``noise`` [R, W, C].

        Points η [R, W, C], the drafted steps w [R, W-1, C] between, and their distributions q.
        """
        snr = columns.snr[:, :-1]
        if self.options.temperature != 1.0:
            noise = noise * self.options.temperature
        clean = self.mean + np.sqrt(self.var) * noise[:, 0]
        steps = clean[:, None] + columns.root[:, 1:-1] * noise[:, 1:]
        moved = np.zeros_like(noise)
        np.cumsum(columns.gain[:, 1:-1] * steps, axis=1, out=moved[:, 1:])
        surer = 1 + self.var[:, None] * (snr - snr[:, :1])  # [R, W, C]
        mean = (self.mean[:, None] + self.var[:, None] * moved[:, :-1]) / surer[:, :-1]
        log_gain = columns.log_gain[:, 1:-1] + self.log_temperature
        log_var = np.log(surer[:, 1:] / surer[:, :-1]) + log_gain
        return self.eta[:, None] + moved, steps, Normal(mean, log_var)

    def _draft_by(
        self, small: BoundHead, columns: Columns, noise: Array
    ) -> tuple[Array, Array, Normal]:
        """The same by the small head, one call a step."""
        points = [self.eta[:, None]]
        steps = [noise[:, :0]]
        means = [noise[:, :0]]
        log_vars = [noise[:, :0]]
        for j in range(noise.shape[1] - 1):
            here = columns.pair(j)
            dist, _ = self._probs(small, [k + j for k in self.k], points[-1], here)
            means.append(dist.mean)
            log_vars.append(dist.log_var)
            steps.append(dist.sample(noise[:, j : j + 1]))
            points.append(points[-1] + here.gain[:, 1:] * steps[-1])
        q = Normal(np.concatenate(means, axis=1), np.concatenate(log_vars, axis=1))
        return np.concatenate(points, axis=1), np.concatenate(steps, axis=1), q

    def _probs(
        self, head: BoundHead, k: list[int], points: Array, columns: Columns
    ) -> tuple[Normal, Array]:
        """Distributions of the steps out of ``points`` [R, W, C] from steps ``k`` on.

        And the log of how much wider they are than 1/Δ.
        """
        x = torch.from_numpy(points * columns.to_x[:, :-1]).to(self.device)
        predicted = head.window(k, x)
        eps: Array = predicted[0].cpu().numpy()
        v: Array = predicted[1].cpu().numpy()
        spread = columns.spread[:, :-1]
        wider: Array = spread + spread * v
        if not (np.abs(wider) < WIDEST).all():
            steps = np.array(k)[:, None] + np.arange(wider.shape[1])
            _check_widths(wider, steps < self.tables.steps)
        clean: Array = points * columns.x_share[:, :-1] - eps * columns.eps_share[:, :-1]
        log_var = wider + (columns.log_gain[:, 1:] + self.log_temperature)
        return Normal(clean, log_var), wider

    def _accept(self, steps: Array, p: Normal, q: Normal) -> list[int]:
        """How many drafted steps of each row are kept."""
        drafted = steps.shape[1]
        log_u = self._numbers(self.log_uniform, self.tables.window - 1)[:, :drafted]
        if not drafted:
            return [0] * len(steps)
        # written so that NaN counts as rejected, and raises when the residual is drawn
        rejected = ~(log_u < log_ratio(p[:, :-1], q, steps))
        runs = np.where(rejected.any(1), rejected.argmax(1), drafted).tolist()
        return [min(run, self._drafted(k, drafted)) for run, k in zip(runs, self.k, strict=True)]

    def _drafted(self, k: int, drafted: int) -> int:
        """Drafted steps of a row at step ``k`` that are not beyond its last point."""
        return min(drafted, self.tables.steps - 1 - k)

    def _advance(
        self, points: Array, p: Normal, wider: Array, q: Normal, gain: Array, kept: list[int]
    ) -> None:
        """Move every row past the steps it keeps and one more: the target's, or of the residual."""
        drafted = q.mean.shape[1]
        rows = np.arange(len(kept))
        at = np.array(kept)
        probs = p[rows, at]
        step = probs.sample(self._numbers(self.normal, points.shape[-1]))
        rejected = [i for i, n in enumerate(kept) if n < self._drafted(self.k[i], drafted)]
        if rejected and self.options.residual:
            pictures = [self.pictures[i] for i in rejected]
            over = q[rejected, at[rejected]]
            step[rejected] = draw_residual(
                probs[rejected], over, pictures, self.batch, self.normal, self.log_uniform
            )
        gain = np.broadcast_to(gain, (len(kept), *gain.shape[1:]))[rows, at + 1]
        self.eta = points[rows, at] + gain * step
        self.k = [k + n + 1 for k, n in zip(self.k, kept, strict=True)]
        if self.options.predictor == "gaussian":
            excess = np.maximum(np.expm1(wider[rows, at]), 0)  # Δ·Var(x0) by the target
            self.mean = (probs.mean + excess * step) / (1 + excess)
            self.var = excess / (gain * (1 + excess))
        else:
            self.mean = probs.mean
            self.var = np.zeros_like(step)

    def _finish(self, finished: list[int], clean: Array, kept: list[int]) -> None:
        """Remove rows ``finished``: their token is their last point's clean token.

        The last step adds no noise.
        """
        for i in finished:
            self.tokens[self.left[i]] = clean[i, kept[i]]
        stay = sorted(set(range(len(kept))) - set(finished))
        self.left, self.k, self.pictures = (
            [v[i] for i in stay] for v in (self.left, self.k, self.pictures)
        )
        if not stay:
            return
        rows = torch.tensor(stay, device=self.device)
        self.bound.keep(rows)
        if self.small is not None:
            self.small.keep(rows)
        self.eta = self.eta[stay]
        self.mean = self.mean[stay]
        self.var = self.var[stay]

    def _numbers(self, stream: Stream, width: int) -> Array:
        """The next ``width`` numbers of every row left: [R, width]."""
        return take(stream, _counts(self.pictures, self.batch), width)


def _check_widths(wider: Array, inside: npt.NDArray[np.bool_]) -> None:
    """Raise ``ValueError`` for a log-variance [R, W, C] out of bounds at a point ``inside``."""
    worst = np.abs(wider[inside])
    if not (worst < WIDEST).all():
        raise ValueError(
            f"head's log-variances must be finite and within {WIDEST} of the posterior's, got "
            f"{float(worst.max()):.3g}: its weights or dtype do not suit the chain"
        )


@dataclass
class ChainSpeculation:
    """A ``MARSampler`` with DDPM's distribution in fewer sequential head calls.

    ``small`` binds a smaller model's head, which then drafts, to the tokens of an iteration.
    """

    head: ChainHead
    normal: Stream
    log_uniform: Stream
    window: int = 16
    options: ChainOptions = field(default_factory=ChainOptions)
    small: Callable[[View, float | Tensor], BoundHead] | None = None
    tables: WindowTables = field(init=False)

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must be at least 2 steps, got {self.window}")
        self.tables = WindowTables(self.head.schedule, self.window)

    def sample(self, condition: HeadCondition, view: View) -> tuple[Tensor, int]:
        """See ``MARSampler``."""
        bound = self.head.bind(condition)
        small = None if self.small is None else self.small(view, condition.scale)
        streams = (self.normal, self.log_uniform)
        made = speculate(bound, self.tables, view.rows, *streams, self.options, small)
        return made.tokens, sum(made.row_calls)
