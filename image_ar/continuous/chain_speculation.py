"""Exact speculation along a token's denoising chain: one head call verifies a window of steps.

Source: speculation on a diffusion chain (De Bortoli et al. 2025, arXiv 2501.05370), with the
generic maximal coupling, since MAR's learned variances differ from a drafter's. Three things differ
from the paper. The chain is run in its natural parameter η = √ᾱ x / (1 - ᾱ), in which every step
adds Δ·w, where Δ is the gain in signal-to-noise ratio and w ~ N(x0, 1/Δ) if the clean token is x0:
w is "what the step believes x0 to be", and it is w that is drafted and verified. The drafter holds
a Gaussian prediction N(m, V) of x0, so a whole window is drawn at once and its distribution is
known in closed form. And V comes with the target's last prediction, for free: a learned variance
above the posterior's is Δ²·Var(x0) in η, which makes the drafts bend as the target's predictions do
instead of repeating the last one. How far its predictions did bend over the windows so far, against
what their variances said, is measured (``Response``) and multiplies V: learned variances are of
single coordinates and often too wide.

The maximal coupling of two diagonal Gaussians: a draft y ~ q is kept with probability min(1,
p(y)/q(y)); else y ~ p is proposed until U > q(y)/p(y), which draws from (p - q)+ / mass. Either way
the result has distribution p (Thorisson 2000; for speculation, arXiv 2211.17192).

All of this is a few hundred numbers a round, kept in numpy on the host, where a call costs a fifth
of torch's; only the head runs where it is. Shape letters: R rows (tokens) still running, W points
of a window, C token width, N rows and K proposals of a coupling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specmm.image_ar.continuous.chain_program import ChainProgram
from specmm.image_ar.continuous.chain_round import (
    WIDEST,
    ChainOptions,
    ChainRows,
    Drafts,
    Mask,
    Normal,
    RowState,
    Verified,
    counts_of,
    draft,
    draw_residual,
    predicted,
    rejections,
    take,
    target_probs,
)
from specmm.image_ar.continuous.chain_windows import Array, Columns, Response, WindowTables
from specmm.image_ar.continuous.diffusion_head import BoundHead, ChainHead, HeadCondition, finite
from specmm.image_ar.continuous.masked_decode import View
from specmm.image_ar.continuous.orders import PictureStreams, Stream


class RoundPrograms(Protocol):
    """What plays many rounds at once, where it can."""

    def speculation(
        self, bound: BoundHead, tables: WindowTables, options: ChainOptions, pictures: int
    ) -> ChainProgram | None:
        """For the tokens of ``bound``, as many of each of so many ``pictures``; None where rounds
        are played one by one.
        """


@dataclass
class Speculated:
    """Finished tokens [R, C], the head calls each took part in [R], and sequential ``calls``."""

    tokens: Tensor
    row_calls: list[int]
    calls: int


@torch.inference_mode()
def speculate(
    bound: BoundHead,
    tables: WindowTables,
    rows: list[int],
    normal: PictureStreams,
    log_uniform: PictureStreams,
    options: ChainOptions | None = None,
    programs: RoundPrograms | None = None,
) -> Speculated:
    """Tokens [R, C] with the distribution of ``ancestral``, in fewer sequential head calls.

    ``rows[b]`` of the R tokens belong to picture b and use its streams. ``programs`` compute rounds
    of few tokens. Raises ``ValueError`` when a chain leaves the finite numbers, and for a
    temperature that is not above 0: such a chain has no distributions to couple.
    """
    options = options or ChainOptions()
    if options.temperature <= 0:
        raise ValueError(
            f"temperature must be above 0 to speculate, got {options.temperature}: "
            "run the chain plainly"
        )
    run = _ChainRun(bound, tables, rows, normal, log_uniform, options, programs)
    while run.left:
        if run.program is not None:
            run.play(run.program)
        if run.left:
            run.round()
    return Speculated(finite(torch.from_numpy(run.tokens).to(run.device)), run.row_calls, run.calls)


@dataclass
class _ChainRun:
    """The rounds of one ``speculate``: rows still running (``left``), their η, step and N(m, V)."""

    bound: BoundHead
    tables: WindowTables
    rows: list[int]
    normal: PictureStreams
    log_uniform: PictureStreams
    options: ChainOptions
    programs: RoundPrograms | None
    calls: int = 0

    def __post_init__(self) -> None:
        head = self.bound.head
        count = len(self.bound)
        self.batch = len(self.rows)
        self.log_temperature = 2 * math.log(self.options.temperature)  # of variances
        self.device = head.device
        self.eta = take(self.normal, self.rows, head.channels) / self.tables.rows[0, 4]
        self.mean = np.zeros_like(self.eta)
        self.var = np.ones_like(self.eta)  # latents have unit variance
        self.response = Response.of(count)
        self.k = [0] * count
        self.pictures = [b for b, n in enumerate(self.rows) for _ in range(n)]
        self.left = list(range(count))
        self.tokens = np.empty_like(self.eta)
        self.row_calls = [0] * count
        self.program: ChainProgram | None = None
        alike = len(set(self.rows)) == 1
        if self.programs is not None and alike:
            given = self.bound, self.tables, self.options, self.batch
            self.program = self.programs.speculation(*given)

    def play(self, program: ChainProgram) -> None:
        """Rounds of all rows by a program; those are left whose next round it cannot play."""
        streams = (self.normal, self.log_uniform)
        rows = ChainRows(self.k, self._state(), self.response)
        made, calls = program(self.left, self.pictures, rows, *streams)
        self.calls += max(calls)
        for row, more in zip(self.left, calls, strict=True):
            self.row_calls[row] += more
        self.k, (self.eta, self.mean, self.var), self.response = made
        finished = [i for i, k in enumerate(self.k) if k == self.tables.steps]
        if finished:
            self._finish(finished, self.eta)

    def round(self) -> None:
        """Draft, one head call, accept; rows that are finished leave."""
        window = self.tables.window
        noise = self._numbers(self.normal, window * self.eta.shape[1])
        noise = noise.reshape(len(self.left), window, -1)
        log_u = self._numbers(self.log_uniform, window - 1)
        found = self._verify(noise, log_u)
        self.calls += 1
        for row in self.left:
            self.row_calls[row] += 1
        kept = self._kept(found.rejected)
        last = self.tables.steps - 1
        finished = [i for i, k in enumerate(self.k) if k + kept[i] == last]
        self._advance(found, kept)
        if finished:
            self._finish(finished, found.p.mean[np.arange(len(kept)), kept])

    def _verify(self, noise: Array, log_u: Array) -> Verified:
        """The next window, drafted by ``noise`` [R, W, C] and verified by ``log_u`` [R, W-1]; of
        fewer points where all rows are near the end of their chains.
        """
        width = min(self.tables.window, self.tables.steps - min(self.k))
        columns = self.tables.at(self.k, width)
        noise = noise[:, :width]
        noise = noise * self.options.temperature
        shares = self.response.shares()
        drafts = draft(self._state(), shares, columns, noise, self.log_temperature)
        p, wider = self._probs(drafts.points, columns)
        return Verified(drafts, p, wider, rejections(drafts, p, log_u[:, : width - 1]))

    def _state(self) -> RowState:
        return RowState(self.eta, self.mean, self.var)

    def _probs(self, points: Array, columns: Columns) -> tuple[Normal, Array]:
        """``target_probs`` of the rows' next steps; raises for wild ones."""
        x = torch.from_numpy(points * columns.to_x[:, :-1]).to(self.device)
        eps, v = (answer.cpu().numpy() for answer in self.bound.window(self.k, x))
        p, wider = target_probs(points, eps, v, columns, self.log_temperature)
        if not np.abs(wider).max() < WIDEST:
            steps = np.array(self.k)[:, None] + np.arange(wider.shape[1])
            _check_widths(wider, steps < self.tables.steps)
        return p, wider

    def _kept(self, rejected: Mask) -> list[int]:
        """How many drafted steps of each row are kept, by which are ``rejected`` [R, W-1]."""
        drafted = rejected.shape[1]
        if not drafted:
            return [0] * len(rejected)
        runs = np.where(rejected.any(1), rejected.argmax(1), drafted).tolist()
        return [min(run, self._drafted(k, drafted)) for run, k in zip(runs, self.k, strict=True)]

    def _drafted(self, k: int, drafted: int) -> int:
        """Drafted steps of a row at step ``k`` that are not beyond its last point."""
        return min(drafted, self.tables.steps - 1 - k)

    def _advance(self, found: Verified, kept: list[int]) -> None:
        """Move every row past the steps it keeps and one more: the target's, or of the residual."""
        drafts, p, wider, _ = found
        rows = np.arange(len(kept))
        at = np.array(kept)
        probs = p[rows, at]
        step = self._next_step(drafts, probs, at)
        gain = self.tables.at(self.k, wider.shape[1]).gain
        out = gain[rows if len(gain) > 1 else 0, at + 1]
        self.eta = drafts.points[rows, at] + out * step
        excess = np.maximum(np.expm1(wider), 0)  # Δ·Var(x0) by the target
        self.response.observe(self._inside(gain[:, 1:-1]), drafts.steps, p.mean, excess)
        self.mean, self.var = predicted(probs.mean, step, out, excess[rows, at])
        self.k = [k + n + 1 for k, n in zip(self.k, kept, strict=True)]

    def _next_step(self, drafts: Drafts, probs: Normal, at: npt.NDArray[np.int64]) -> Array:
        """Steps [R, C] out of the points ``at`` [R], where the target's distributions are ``probs``
        [R, C]: of the residual where a draft was rejected.
        """
        step = probs.sample(self._numbers(self.normal, probs.mean.shape[-1]))
        drafted = drafts.steps.shape[1]
        rejected = [i for i, n in enumerate(at) if n < self._drafted(self.k[i], drafted)]
        if rejected and self.options.residual:
            pictures = [self.pictures[i] for i in rejected]
            over = drafts.q[rejected, at[rejected]]
            step[rejected] = draw_residual(
                probs[rejected], over, pictures, self.batch, self.normal, self.log_uniform
            )
        return step

    def _inside(self, gain: Array) -> Array:
        """``gain`` [R or 1, W-1, 1] with 0 for steps beyond a row's last point."""
        drafted = gain.shape[1]
        if max(self.k) + drafted < self.tables.steps:
            return gain
        last = np.array([self._drafted(k, drafted) for k in self.k])
        return gain * (np.arange(drafted) < last[:, None])[:, :, None]

    def _finish(self, finished: list[int], clean: Array) -> None:
        """Remove rows ``finished``: their token is their last point's ``clean`` one [R, C].

        The last step adds no noise.
        """
        for i in finished:
            self.tokens[self.left[i]] = clean[i]
        stay = sorted(set(range(len(clean))) - set(finished))
        self.left, self.k, self.pictures = (
            [v[i] for i in stay] for v in (self.left, self.k, self.pictures)
        )
        if not stay:
            return
        rows = torch.tensor(stay, device=self.device)
        self.bound.keep(rows)
        self.eta = self.eta[stay]
        self.mean = self.mean[stay]
        self.var = self.var[stay]
        self.response.keep(stay)

    def _numbers(self, stream: Stream, width: int) -> Array:
        """The next ``width`` numbers of every row left: [R, width]."""
        return take(stream, counts_of(self.pictures, self.batch), width)


def _check_widths(wider: Array, inside: Mask) -> None:
    """Raise ``ValueError`` for a log-variance [R, W, C] out of bounds at a point ``inside``."""
    worst = np.abs(wider[inside])
    if not (worst < WIDEST).all():
        raise ValueError(
            f"head's log-variances must be finite and within {WIDEST} of the posterior's, got "
            f"{float(worst.max()):.3g}: its weights or dtype do not suit the chain"
        )


@dataclass
class ChainSpeculation:
    """A ``MARSampler`` with DDPM's distribution in fewer sequential head calls."""

    head: ChainHead
    normal: PictureStreams
    log_uniform: PictureStreams
    window: int = 16
    options: ChainOptions = field(default_factory=ChainOptions)
    programs: RoundPrograms | None = None
    tables: WindowTables = field(init=False)

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must be at least 2 steps, got {self.window}")
        self.tables = WindowTables(self.head.schedule, self.window)

    def sample(self, condition: HeadCondition, view: View) -> tuple[Tensor, int]:
        bound = self.head.bind(condition)
        streams = (self.normal, self.log_uniform)
        made = speculate(bound, self.tables, view.rows, *streams, self.options, self.programs)
        return made.tokens, sum(made.row_calls)
