"""Exact speculation along a token's denoising chain: one head call verifies a window of steps.

Source: speculation on a diffusion chain (De Bortoli et al. 2025, arXiv 2501.05370), with the
generic maximal coupling, since MAR's learned variances differ from a drafter's. Three things differ
from the paper. The chain is run in its natural parameter η = √ᾱ x / (1 - ᾱ), in which every step
adds Δ·w, where Δ is the gain in signal-to-noise ratio and w ~ N(x0, 1/Δ) if the clean token is x0:
w is "what the step believes x0 to be", and it is w that is drafted and verified. The drafter holds
a Gaussian prediction N(m, V) of x0, so a whole window is drawn at once and its distribution is
known in closed form. And V comes with the target's last prediction, for free: a learned variance
exceeds the posterior's by Δ²·Var(x0) in η, so drafts follow the trend of the target's predictions
instead of repeating the last one. How much its predictions really moved over the windows so far,
compared with their variances, is measured (``Response``) and multiplies V, because learned
variances are per coordinate and often too wide.

The maximal coupling of two diagonal Gaussians: a draft y ~ q is kept with probability min(1,
p(y)/q(y)); else y ~ p is proposed until U > q(y)/p(y), which draws from (p - q)+ / mass. Either way
the result has distribution p (Thorisson 2000; for speculation, arXiv 2211.17192).

All of this is a few hundred numbers a round, computed in numpy on the host, where a call costs a
fifth of torch's (with tensors, rounds of pocket/mar take twice as long); only the head runs on its
device. Shape letters: R rows (tokens) still running, W points of a window, C token width, N rows
and K proposals of a coupling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from specmm.image_ar.continuous.chain_program import ChainProgram
from specmm.image_ar.continuous.chain_round import (
    TURNS,
    WIDEST,
    ChainRows,
    Mask,
    Normal,
    play_round,
)
from specmm.image_ar.continuous.chain_windows import Array, Columns, WindowTables
from specmm.image_ar.continuous.diffusion_head import BoundHead, ChainHead, HeadCondition, finite
from specmm.image_ar.continuous.orders import PictureStreams, Stream

Programs: TypeAlias = Callable[[BoundHead, WindowTables, float, int], ChainProgram | None]
"""The program that runs many rounds at once of the tokens of a head bound to them, equally many of
each of so many pictures, at a temperature; None if rounds must run one by one.
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
    temperature: float = 1.0,
    programs: Programs | None = None,
) -> Speculated:
    """Tokens [R, C] with the distribution of ``ancestral``, in fewer sequential head calls.

    ``rows[b]`` of the R tokens belong to picture b and use its streams. ``programs`` compute rounds
    of few tokens. Raises ``ValueError`` when a chain leaves the finite numbers, and for a
    temperature that is not above 0: such a chain has no distributions to couple.
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature must be above 0 to speculate, got {temperature}: run the chain plainly"
        )
    run = ChainRun(bound, tables, rows, (normal, log_uniform), temperature)
    program: ChainProgram | None = None
    if programs is not None and len(set(rows)) == 1:
        program = programs(bound, tables, temperature, len(rows))
    while len(unfinished := run.left()):
        if program is not None:
            program(run.rows, run.streams)
            unfinished = run.left()
        if len(unfinished):
            run.round(unfinished)
    calls = run.now.calls.tolist()
    tokens = torch.from_numpy(run.now.eta).to(bound.head.device)
    return Speculated(finite(tokens), calls, max(calls))


class ChainRun:
    """The rounds of one :func:`speculate` on the host, with the ``state`` of all rows, including
    finished rows. Implements :class:`~specmm.image_ar.continuous.chain_round.Chain`.
    """

    state: ClassVar[tuple[str, ...]] = ("rows",)

    def __init__(
        self,
        bound: BoundHead,
        tables: WindowTables,
        rows: list[int],
        streams: tuple[PictureStreams, PictureStreams],
        temperature: float,
    ) -> None:
        self.bound = bound
        self.tables = tables
        self.streams = streams
        self.steps = tables.steps
        self.window = tables.window
        self.temperature = temperature
        self.log_temperature = 2 * math.log(temperature)  # the temperature's effect on variances
        self.batch = len(rows)
        self.pictures = np.repeat(np.arange(self.batch), rows)
        eta = take(streams[0], rows, bound.head.channels) / tables.rows[0, 4]
        k, calls = np.zeros((2, len(eta)), np.int64)
        seen, implied = np.ones((2, len(eta)), np.float32)
        ones = np.ones_like(eta)  # latents have unit variance
        self.now = ChainRows(k, calls, eta, 0 * ones, ones, seen, implied)
        self.rows = [torch.from_numpy(x) for x in self.now]  # the same memory

    def left(self) -> Array:
        """The rows that are not finished [N]."""
        return np.flatnonzero(self.now.k < self.steps)

    def round(self, unfinished: Array) -> None:
        """A round of the ``unfinished`` rows [N]."""
        self.played = unfinished.tolist()
        at = slice(None) if len(unfinished) == len(self.pictures) else unfinished  # views, mostly
        rows = ChainRows(*(x[at] for x in self.now))
        numbers = StreamNumbers(self.streams, self.pictures[at], self.batch)
        for x, value in zip(self.now, play_round(self, rows, numbers), strict=True):
            x[at] = value

    def columns(self, k: Array) -> Columns:
        """The columns of a window at ``k``; shorter if all rows are near their chains' ends."""
        return self.tables.at(k, min(self.window, max(2, self.steps - int(k.min()))))

    def answers(self, k: Array, x: Array) -> tuple[Array, Array]:
        points = torch.from_numpy(x).to(self.bound.head.device)
        eps, v = self.bound.window(self.played, k.tolist(), points)
        return eps.cpu().numpy(), v.cpu().numpy()

    def look(self, p: Normal, wider: Array, k: Array) -> None:
        """Raises ``ValueError`` for a log-variance out of bounds or a mean that is not finite."""
        if not np.abs(wider).max() < WIDEST:
            inside = k[:, None] + np.arange(wider.shape[1]) < self.steps
            worst = np.abs(wider[inside])
            if not (worst < WIDEST).all():
                raise ValueError(
                    f"head's log-variances must be finite and within {WIDEST} of the posterior's, "
                    f"got {float(worst.max()):.3g}: its weights or dtype do not suit the chain"
                )
        if not math.isfinite(p.mean.sum()):
            finite(torch.from_numpy(p.mean))

    def lack(self, lost: Mask) -> None:
        """Does nothing: the host draws as many proposals as a residual needs."""


def take(stream: Stream, rows: list[int], width: int) -> Array:
    """``stream.draw`` as an array."""
    drawn: Array = stream.draw(rows, width).cpu().numpy()
    return drawn


class StreamNumbers:
    """The next numbers of ``streams`` for rows of ``pictures`` [N], of ``batch`` in all."""

    turns = TURNS

    def __init__(
        self, streams: tuple[PictureStreams, PictureStreams], pictures: Array, batch: int
    ) -> None:
        self.streams = streams
        self.pictures = pictures
        self.batch = batch
        self.every = self._counts(pictures)

    def normals(self, rows: Mask | None, count: int) -> Array:
        return self._take(0, rows, count)

    def log_uniforms(self, rows: Mask | None, count: int) -> Array:
        return self._take(1, rows, count)

    def chosen(self, rows: Mask) -> Any:
        return slice(None) if len(rows) == 1 else np.flatnonzero(rows)

    def needed(self, rows: Mask) -> bool:
        return bool(rows.any())

    def _take(self, i: int, rows: Mask | None, count: int) -> Array:
        counts = self.every if rows is None else self._counts(self.pictures[rows])
        return take(self.streams[i], counts, count)

    def _counts(self, pictures: Array) -> list[int]:
        if self.batch == 1:
            return [len(pictures)]
        counts: list[int] = np.bincount(pictures, minlength=self.batch).tolist()
        return counts


@dataclass
class ChainSpeculation:
    """A ``MARSampler`` with DDPM's distribution in fewer sequential head calls."""

    head: ChainHead
    normal: PictureStreams
    log_uniform: PictureStreams
    window: int = 16
    temperature: float = 1.0
    programs: Programs | None = None
    tables: WindowTables = field(init=False)

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must be at least 2 steps, got {self.window}")
        self.tables = WindowTables(self.head.schedule, self.window)

    def sample(self, condition: HeadCondition, rows: list[int]) -> tuple[Tensor, int]:
        bound = self.head.bind(condition)
        streams = (self.normal, self.log_uniform)
        result = speculate(bound, self.tables, rows, *streams, self.temperature, self.programs)
        return result.tokens, sum(result.row_calls)
