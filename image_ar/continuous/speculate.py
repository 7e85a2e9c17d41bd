"""Exact acceleration of a token's denoising chain: draft a window of steps, verify all of them in
one head call.

Source: speculation on a diffusion chain (De Bortoli et al. 2025, arXiv 2501.05370), with the
generic maximal coupling, since MAR's learned variances differ from a drafter's. Three things are
our own. The chain is run in its natural parameter η = √ᾱ x / (1 - ᾱ), in which every step adds Δ·w,
where Δ is the gain in signal-to-noise ratio and w ~ N(x0, 1/Δ) if the clean token is x0: w is "what
the step takes x0 to be", and it is w that is drafted and verified. The drafter holds a Gaussian
prediction N(m, V) about x0, so that a whole window is drawn at once and its distribution is known
in closed form. And V comes with the target's last answer, for free: a learned variance above the
posterior's is Δ²·Var(x0) in η, which makes the drafts bend as the target's predictions do instead
of repeating the last one.

All of this is a few hundred numbers a round, kept in numpy on the host, where a call costs a fifth
of torch's; only the head runs where it lives. Shape letters: R rows (tokens) still running, S
steps, W points of a window, C token width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specmm.image_ar.continuous.chain import BoundHead, finite
from specmm.image_ar.continuous.coupling import (
    Array,
    Normal,
    counts_by_picture,
    draw_residual,
    log_ratio,
    take,
)
from specmm.image_ar.continuous.diffusion import Schedule
from specmm.image_ar.continuous.noise import Numbers

Predictor = Literal["gaussian", "frozen", "small"]
WIDEST = 80.0  # beyond this float32 has no such variance


class WindowTables:
    """Numbers [S + W, 8, 1] of every point, float32; the last point is repeated for windows that
    reach beyond it.

    snr; the gain Δ of the step into the point, its inverse root, log 1/Δ (all for temperature 1);
    what turns η into x; the shares of η and eps in x0 = a·η - b·eps; half the log of the learned
    variance's range in the step *out*.
    """

    def __init__(self, schedule: Schedule, window: int) -> None:
        level = schedule.alphas_cumprod.flip(0).numpy()
        snr, rest = level / (1 - level), 1 - level
        gain = np.diff(snr, prepend=0.0)
        low, high = schedule.posterior_log_variance_clipped.flip(0), schedule.betas.log().flip(0)
        spread = (high - low).numpy() / 2
        shares = [rest / np.sqrt(level), rest / level, np.sqrt(rest / level)]
        table = np.stack([snr, gain, gain**-0.5, -np.log(gain), *shares, spread], axis=1)
        self.rows = np.concatenate([table, table[-1:].repeat(window, 0)]).astype(np.float32)[
            :, :, None
        ]
        self.steps, self.window = len(level), window

    def at(self, k: list[int], width: int) -> list[Array]:
        """The columns [R or 1, W + 1, 1] for windows of ``width`` points that start at steps ``k``
        [R].
        """
        if len(set(k)) == 1:
            rows = self.rows[None, k[0] : k[0] + width + 1]
        else:
            rows = self.rows[np.array(k)[:, None] + np.arange(width + 1)]
        return [rows[:, :, i] for i in range(rows.shape[2])]


@dataclass
class Speculated:
    """Finished tokens [R, C], head calls each of them took part in [R], and ``calls`` made one
    after another.
    """

    tokens: Tensor
    row_calls: list[int]
    calls: int


@dataclass
class Options:
    """How to speculate; ``residual=False`` leaves the residual out, which is wrong: the tests'
    broken twin.
    """

    temperature: float = 1.0
    predictor: Predictor = "gaussian"
    residual: bool = True


@torch.inference_mode()
def speculate(
    bound: BoundHead,
    tables: WindowTables,
    rows: list[int],
    normal: Numbers,
    log_uniform: Numbers,
    options: Options | None = None,
    small: BoundHead | None = None,
) -> Speculated:
    """Tokens [R, C] with the distribution of ``chain.ancestral``, in fewer sequential head calls.

    ``rows[b]`` of the R tokens belong to picture b and take their numbers from its streams.
    ``small`` is a smaller model's head, bound to the same tokens: it then drafts, step by step.
    Raises ``ValueError`` when a chain leaves the finite numbers, and for a temperature that is not
    above 0: such a chain has no distributions to couple.
    """
    options = options or Options()
    if options.temperature <= 0:
        raise ValueError(
            f"temperature must be above 0 to speculate, got {options.temperature}: run the chain plainly"
        )
    run = _Run(bound, tables, rows, normal, log_uniform, options, small)
    while run.left:
        run.round()
    return Speculated(finite(torch.from_numpy(run.tokens).to(run.device)), run.row_calls, run.calls)


class _Run:
    """The rounds of one ``speculate``: rows still running (``left``), their η, step k and
    prediction N(mean, var).
    """

    def __init__(
        self,
        bound: BoundHead,
        tables: WindowTables,
        rows: list[int],
        normal: Numbers,
        log_uniform: Numbers,
        options: Options,
        small: BoundHead | None = None,
    ) -> None:
        self.bound, self.tables, self.options, self.small = bound, tables, options, small
        self.normal, self.log_uniform, self.batch = normal, log_uniform, len(rows)
        self.temperature, self.log_temperature = (
            options.temperature,
            2 * math.log(options.temperature),
        )
        self.device = bound.head.device
        self.eta = take(normal, rows, bound.head.channels) / tables.rows[0, 4]
        self.mean, self.var = (
            np.zeros_like(self.eta),
            np.ones_like(self.eta),
        )  # latents have unit variance
        self.k = [0] * len(bound)
        self.pictures = [b for b, n in enumerate(rows) for _ in range(n)]
        self.left, self.tokens = list(range(len(bound))), np.empty_like(self.eta)
        self.calls, self.row_calls = 0, [0] * len(bound)

    def round(self) -> None:
        """Draft, one head call, accept; rows that are through leave."""
        width = min(self.tables.window, self.tables.steps - min(self.k))
        columns = self.tables.at(self.k, width)
        noise = self._numbers(self.normal, self.tables.window * self.eta.shape[1])
        noise = noise.reshape(len(self.left), -1, self.eta.shape[1])[:, :width]
        points, steps, q = (
            self._draft(columns, noise)
            if self.small is None
            else self._ask(self.small, columns, noise)
        )
        p, wider = self._score(points, columns)
        kept = self._accept(steps, p, q)
        through = [
            i
            for i, (k, n) in enumerate(zip(self.k, kept, strict=True))
            if k + n == self.tables.steps - 1
        ]
        self._advance(points, p, wider, q, columns[1], kept)
        if through:
            self._finish(through, p.mean, kept)

    def _draft(self, columns: list[Array], noise: Array) -> tuple[Array, Array, Normal]:
        """Points η [R, W, C], the drafted steps w [R, W-1, C] between, and their distributions q,
        from ``noise`` [R, W, C].
        """
        snr, gain, root, log_gain = (c[:, :-1] for c in columns[:4])
        noise = noise if self.temperature == 1.0 else noise * self.temperature
        clean = self.mean + np.sqrt(self.var) * noise[:, 0]
        steps = clean[:, None] + root[:, 1:] * noise[:, 1:]
        moved = np.zeros_like(noise)
        np.cumsum(gain[:, 1:] * steps, axis=1, out=moved[:, 1:])
        surer = 1 + self.var[:, None] * (snr - snr[:, :1])  # [R, W, C]
        mean = (self.mean[:, None] + self.var[:, None] * moved[:, :-1]) / surer[:, :-1]
        log_var = np.log(surer[:, 1:] / surer[:, :-1]) + (log_gain[:, 1:] + self.log_temperature)
        return self.eta[:, None] + moved, steps, Normal(mean, log_var)

    def _ask(
        self, small: BoundHead, columns: list[Array], noise: Array
    ) -> tuple[Array, Array, Normal]:
        """The same by the small head, one call a step."""
        points, steps, probs = [self.eta[:, None]], [], []
        for j in range(noise.shape[1] - 1):
            here = [c[:, j : j + 2] for c in columns]
            dist, _ = self._probs(small, [k + j for k in self.k], points[-1], here)
            probs.append(dist)
            steps.append(dist.sample(noise[:, j : j + 1]))
            points.append(points[-1] + here[1][:, 1:] * steps[-1])
        if not probs:
            return points[0], noise[:, :0], Normal(noise[:, :0], noise[:, :0])
        mean, log_var = (
            np.concatenate([getattr(dist, name) for dist in probs], axis=1)
            for name in ("mean", "log_var")
        )
        return np.concatenate(points, axis=1), np.concatenate(steps, axis=1), Normal(mean, log_var)

    def _score(self, points: Array, columns: list[Array]) -> tuple[Normal, Array]:
        """The target's distributions p of the steps out of the points, and the log of how much
        wider they are than 1/Δ.
        """
        self.calls += 1
        for row in self.left:
            self.row_calls[row] += 1
        return self._probs(self.bound, self.k, points, columns)

    def _probs(
        self, head: BoundHead, k: list[int], points: Array, columns: list[Array]
    ) -> tuple[Normal, Array]:
        """Distributions of the steps out of ``points`` [R, W, C] from steps ``k`` on, and how much
        wider than 1/Δ (log).
        """
        to_x, x_share, eps_share, spread = (c[:, :-1] for c in columns[4:])
        answer = head.window(k, torch.from_numpy(points * to_x).to(self.device))
        eps: Array = answer[0].cpu().numpy()
        v: Array = answer[1].cpu().numpy()
        wider: Array = spread + spread * v
        if not (np.abs(wider) < WIDEST).all():
            _check_widths(
                wider, np.array(k)[:, None] + np.arange(wider.shape[1]) < self.tables.steps
            )
        clean: Array = points * x_share - eps * eps_share
        return Normal(clean, wider + (columns[3][:, 1:] + self.log_temperature)), wider

    def _accept(self, steps: Array, p: Normal, q: Normal) -> list[int]:
        """How many drafted steps of each row are kept."""
        drafted = steps.shape[1]
        luck = self._numbers(self.log_uniform, self.tables.window - 1)[:, :drafted]
        lost = ~(
            luck < log_ratio(p[:, :-1], q, steps)
        )  # so that NaN counts as lost, and is found there
        runs = np.where(lost.any(1), lost.argmax(1), drafted) if drafted else [0] * len(steps)
        return [
            min(int(run), self._drafted(k, drafted)) for run, k in zip(runs, self.k, strict=True)
        ]

    def _drafted(self, k: int, drafted: int) -> int:
        """Drafted steps of a row at step ``k`` that are not beyond its last point."""
        return min(drafted, self.tables.steps - 1 - k)

    def _advance(
        self, points: Array, p: Normal, wider: Array, q: Normal, gain: Array, kept: list[int]
    ) -> None:
        """Move every row after the steps it keeps and one more, of the target's own distribution or
        of what q lacks of it.
        """
        drafted, rows, at = q.mean.shape[1], np.arange(len(kept)), np.array(kept)
        probs = p[rows, at]
        step = probs.sample(self._numbers(self.normal, points.shape[-1]))
        lost = [i for i, n in enumerate(kept) if n < self._drafted(self.k[i], drafted)]
        if lost and self.options.residual:
            pictures = [self.pictures[i] for i in lost]
            over = q[lost, at[lost]]
            step[lost] = draw_residual(
                probs[lost], over, pictures, self.batch, self.normal, self.log_uniform
            )
        gain = (
            gain.repeat(len(kept), 0)[rows, at + 1] if len(gain) < len(kept) else gain[rows, at + 1]
        )
        self.eta = points[rows, at] + gain * step
        self.k = [k + n + 1 for k, n in zip(self.k, kept, strict=True)]
        if self.options.predictor == "gaussian":
            excess = np.maximum(np.expm1(wider[rows, at]), 0)  # Δ·Var(x0) by the target
            self.mean = (probs.mean + excess * step) / (1 + excess)
            self.var = excess / (gain * (1 + excess))
        else:
            self.mean, self.var = probs.mean, np.zeros_like(step)

    def _finish(self, through: list[int], clean: Array, kept: list[int]) -> None:
        """Take rows ``through`` out: their last point's clean token is the token, since the last
        step adds no noise.
        """
        for i in through:
            self.tokens[self.left[i]] = clean[i, kept[i]]
        stay = sorted(set(range(len(kept))) - set(through))
        self.left, self.k, self.pictures = (
            [v[i] for i in stay] for v in (self.left, self.k, self.pictures)
        )
        if stay:
            rows = torch.tensor(stay, device=self.device)
            self.bound.keep(rows)
            if self.small is not None:
                self.small.keep(rows)
            self.eta, self.mean, self.var = self.eta[stay], self.mean[stay], self.var[stay]

    def _numbers(self, numbers: Numbers, width: int) -> Array:
        """The next ``width`` numbers of every row left: [R, width]."""
        return take(numbers, counts_by_picture(self.pictures, self.batch), width)


def _check_widths(wider: Array, inside: npt.NDArray[np.bool_]) -> None:
    """Raise ``ValueError`` when a log-variance [R, W, C] at a point ``inside`` [R, W] the chain is
    out of bounds.
    """
    worst = np.abs(wider[inside])
    if not (worst < WIDEST).all():
        raise ValueError(
            f"head's log-variances must be finite and within {WIDEST} of the posterior's, got "
            f"{float(worst.max()):.3g}: its weights or dtype do not suit the chain"
        )
