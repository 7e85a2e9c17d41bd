"""Speculation along denoising chains as a program: rounds go on until all rows are finished.

It plays the rounds of :mod:`specmm.image_ar.continuous.chain_speculation` on the same numbers, of
pictures with one row each. A round whose numbers have not been drawn yet, or whose residual needs
more proposals than a program has, is left to that module. Shape letters as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specmm.compiled import looped
from specmm.image_ar.continuous.chain_round import (
    FIRST_TRIES,
    WIDEST,
    ChainOptions,
    ChainRows,
    Normal,
    RowState,
    Verified,
    draft,
    log_ratio,
    predicted,
    rejections,
    target_probs,
)
from specmm.image_ar.continuous.chain_windows import (
    Columns,
    Response,
    WindowTables,
    clamped,
    columns_of,
)
from specmm.image_ar.continuous.diffusion_head import BoundHead, HeadWeights, guided
from specmm.image_ar.continuous.orders import PictureStreams

NORMALS, UNIFORMS = 8192, 1024  # numbers of a row that a program is given
TRIES = tuple(accumulate(FIRST_TRIES * 4**turn for turn in range(3)))  # of a residual, after turns


class ChainState(NamedTuple):
    """``counts`` [R, 4] int64: a row's step (S: it is finished), the numbers it has used of both
    streams, its head calls. ``rows`` [R, 3, C]: its ``RowState``; a finished row's η is its token.
    ``response`` [R, 2], and whether it is ``going`` [R] on.
    """

    counts: Tensor
    rows: Tensor
    response: Tensor
    going: Tensor


class Fixed(NamedTuple):
    """What does not change: the head's ``weights`` and ``modulations`` [S, R, G, F], ``windows``
    (``WindowTables``), guidance, temperature and the log of its square (``numbers`` [3]), the rows'
    next numbers of both streams and how many of them there are (``held`` [R, 2]).
    """

    weights: HeadWeights
    modulations: Tensor
    windows: Tensor
    numbers: Tensor
    normals: Tensor
    log_uniforms: Tensor
    held: Tensor


class ChainProgram:
    """Rounds of R rows by ``run``, which does what :func:`run_rounds` does; those that are finished
    stay in the program.
    """

    def __init__(
        self,
        run: Callable[[Fixed, ChainState, bool, bool], tuple[Tensor, ...]],
        bound: BoundHead,
        tables: WindowTables,
        options: ChainOptions,
    ) -> None:
        self.run = run
        self.count = len(bound)
        self.gaussian = options.predictor == "gaussian"
        self.residual = options.residual
        self.device = bound.head.device
        warmth = options.temperature
        numbers = torch.tensor([float(bound.scale), warmth, 2 * math.log(warmth)])
        windows = torch.from_numpy(tables.rows)
        assert bound.table is not None, "iterations of few tokens have one"
        there = windows.to(self.device), numbers.to(self.device)
        self.fixed = (bound.head.weights, bound.table, *there)

    def __call__(
        self,
        left: list[int],
        pictures: list[int],
        rows: ChainRows,
        normal: PictureStreams,
        log_uniform: PictureStreams,
    ) -> tuple[ChainRows, list[int]]:
        """``rows``, which are the rows ``left`` of all, after as many rounds as the streams of
        their ``pictures`` have numbers for, and how many rounds each took part in.
        """
        streams = ((normal, NORMALS), (log_uniform, UNIFORMS))
        given = [self._numbers(left, pictures, *stream) for stream in streams]
        held = torch.tensor([each for _, each in given], device=self.device).T.contiguous()
        fixed = Fixed(*self.fixed, given[0][0], given[1][0], held)
        found = self.run(fixed, self._begin(left, rows), self.gaussian, self.residual)
        made = ChainState(*(part[left].cpu() for part in found))
        k, used, spent, calls = made.counts.T.tolist()
        for b, first, second in zip(pictures, used, spent, strict=True):
            normal.skip(b, first)
            log_uniform.skip(b, second)
        state = RowState(*made.rows.transpose(0, 1).contiguous().numpy())
        response = Response(*made.response.T.contiguous().numpy())
        return ChainRows(k, state, response), calls

    def _numbers(
        self, left: list[int], pictures: list[int], stream: PictureStreams, most: int
    ) -> tuple[Tensor, list[int]]:
        """The next numbers of ``left`` rows [R, ``most``], and how many there are of each row."""
        numbers = torch.zeros(self.count, most, device=self.device)
        held = [0] * self.count
        for row, b in zip(left, pictures, strict=True):
            ahead = stream.ahead(b, most)
            numbers[row, : len(ahead)] = ahead
            held[row] = len(ahead)
        return numbers, held

    def _begin(self, left: list[int], rows: ChainRows) -> ChainState:
        counts = torch.zeros(self.count, 4, dtype=torch.int64)
        counts[left, 0] = torch.tensor(rows.k)
        going = torch.zeros(self.count, dtype=torch.bool)
        going[left] = True
        state = self._spread(left, torch.stack([torch.from_numpy(x) for x in rows.state], 1))
        told = (rows.response.seen, rows.response.implied)
        response = self._spread(left, torch.stack([torch.from_numpy(x) for x in told], 1))
        made = ChainState(counts, state, response, going)
        return ChainState(*(part.to(self.device) for part in made))

    def _spread(self, left: list[int], x: Tensor) -> Tensor:
        """``x`` of the rows ``left`` among all, of which others are 1."""
        full = torch.ones(self.count, *x.shape[1:])
        full[left] = x
        return full


def run_rounds(
    fixed: Fixed, begin: ChainState, gaussian: bool, residual: bool
) -> tuple[Tensor, ...]:
    """The state of rows after their rounds; ``ChainOptions`` says what the flags are."""

    def play(
        counts: Tensor, rows: Tensor, response: Tensor, going: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = ChainState(counts, rows, response, going)
        return tuple(play_round(fixed, state, gaussian, residual))  # type: ignore[return-value]

    return looped(lambda *state: state[3].any(), play, tuple(begin))


def play_round(fixed: Fixed, state: ChainState, gaussian: bool, residual: bool) -> ChainState:
    """One round; a row that needs what is not there stops as it was before."""
    k, used, spent, calls = state.counts.unbind(1)
    steps = len(fixed.modulations)
    drafted = len(fixed.windows) - steps - 1
    width = state.rows.shape[2]
    normals = _next(fixed.normals, used, (drafted + 2 + TRIES[-1]) * width)
    normals = normals.unflatten(1, (-1, width))
    logs = _next(fixed.log_uniforms, spent, drafted + TRIES[-1])
    at = k.clamp(max=steps - 1)[:, None] + _range(drafted + 2, k)
    columns = columns_of(fixed.windows[at])
    response = Response(*state.response.unbind(1))
    noise = normals[:, : drafted + 1] * fixed.numbers[1]
    verified = _verify(fixed, state.rows, response, (at, columns), noise, logs[:, :drafted])
    drafts, p, wider, rejected = verified

    limit = (steps - 1 - k).clamp(min=0, max=drafted)  # drafts that are not beyond the last point
    kept = torch.minimum(_first(rejected), limit)
    step, tries = _next_step(
        verified, kept, limit, normals[:, drafted + 1 :], logs[:, drafted:], residual
    )
    row = _range(len(k), k)
    clean = p.mean[row, kept]
    out = columns.gain[row, kept + 1]
    eta = drafts.points[row, kept] + out * step
    mean, var = clean, torch.zeros_like(clean)
    if gaussian:
        excess = clamped(torch.expm1(wider), 0.0)
        inside = _range(drafted, k) < limit[:, None]
        response.observe(columns.gain[:, 1:-1] * inside[:, :, None], drafts.steps, p.mean, excess)
        mean, var = predicted(clean, step, out, excess[row, kept])
    done = k + kept == steps - 1
    eta = torch.where(done[:, None], clean, eta)
    use = drafted + 2 + tries
    counts = [k + kept + 1, used + use * width, spent + drafted + tries, calls + 1]
    moved = ChainState(
        torch.stack(counts, dim=1),
        torch.stack([eta, mean, var], dim=1),
        torch.stack([response.seen, response.implied], dim=1),
        ~done,
    )
    sane = (wider.abs() < WIDEST) | (at[:, :-1, None] >= steps)
    served = state.going & (tries <= TRIES[-1]) & sane.flatten(1).all(1)
    return _moved(state, moved, served & (moved.counts[:, 1:3] <= fixed.held).all(1))


def _moved(before: ChainState, after: ChainState, which: Tensor) -> ChainState:
    """Rows ``which`` [R] as they are ``after`` a round, others as ``before`` it and stopped."""
    return ChainState(
        torch.where(which[:, None], after.counts, before.counts),
        torch.where(which[:, None, None], after.rows, before.rows),
        torch.where(which[:, None], after.response, before.response),
        which & after.going,
    )


def _verify(
    fixed: Fixed,
    rows: Tensor,
    response: Response,
    place: tuple[Tensor, Columns],
    noise: Tensor,
    log_u: Tensor,
) -> Verified:
    """The windows of ``rows`` at a ``place``: steps ``at`` [R, W + 1] and their columns."""
    at, columns = place
    log_temperature = fixed.numbers[2]
    state = RowState(*rows.unbind(1))
    drafts = draft(state, response.shares(), columns, noise, log_temperature)
    last = len(fixed.modulations) - 1
    own = fixed.modulations[at[:, :-1].clamp(max=last), _range(len(at), at)[:, None]]
    x = drafts.points * columns.to_x[:, :-1]
    eps, v = guided(fixed.weights, x, own, fixed.numbers[0])
    p, wider = target_probs(drafts.points, eps, v, columns, log_temperature)
    return Verified(drafts, p, wider, rejections(drafts, p, log_u))


def _next_step(
    found: Verified, kept: Tensor, limit: Tensor, normals: Tensor, logs: Tensor, residual: bool
) -> tuple[Tensor, Tensor]:
    """Steps [R, C] after ``kept`` drafts [R] of the ``limit`` there are, and the proposals tried:
    the target's, or, unless all are kept, of the residual.
    """
    row = _range(len(kept), kept)
    probs = found.p[row, kept]
    step = probs.sample(normals[:, 0])
    if not residual:
        return step, torch.zeros_like(kept)
    q = found.drafts.q
    over = q[row, kept.clamp(max=q.mean.shape[1] - 1)]
    other, tries = _from_residual(probs, over, normals[:, 1:], logs)
    lost = kept < limit
    return torch.where(lost[:, None], other, step), torch.where(lost, tries, 0)


def _from_residual(p: Normal, q: Normal, normals: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """As ``draw_residual`` [R, C], and its tries [R]: more than there are where none is good."""
    y = p[:, None].sample(normals)
    good = logs > -log_ratio(p[:, None], q[:, None], y)
    first = _first(good)
    tries = torch.full_like(first, TRIES[-1] + 1)
    for enough in reversed(TRIES):
        tries = torch.where(first < enough, enough, tries)
    return y[_range(len(first), first), first.clamp(max=TRIES[-1] - 1)], tries


def _first(flags: Tensor) -> Tensor:
    """By row of ``flags`` [R, N], how many come before the first that is True [R]."""
    count = flags.shape[1]
    return torch.where(flags, _range(count, flags), count).amin(1)


def _next(numbers: Tensor, used: Tensor, count: int) -> Tensor:
    """The ``count`` numbers of each row after those ``used`` [R]; beyond the last, any."""
    at = used[:, None] + _range(count, used)
    return numbers.gather(1, at.clamp(max=numbers.shape[1] - 1))


def _range(count: int, where: Tensor) -> Tensor:
    """0 to ``count`` - 1, on the device of ``where``."""
    return torch.arange(count, device=where.device)
