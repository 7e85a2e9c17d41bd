"""Speculation along denoising chains as a program: rounds go on until all rows are finished.

It plays the rounds of :mod:`specmm.image_ar.continuous.chain_speculation` on the same numbers, of
pictures with one row each. A round whose numbers have not been drawn yet, or whose residual needs
more proposals than a program has, is left to that module. Shape letters as there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specmm.compiled import Program, looped
from specmm.image_ar.continuous.chain_round import (
    FIRST_TRIES,
    WIDEST,
    Array,
    ChainOptions,
    ChainRows,
    Mask,
    Normal,
    RowState,
    Verified,
    draft,
    log_ratio,
    predicted,
    rejections,
    target_probs,
)
from specmm.image_ar.continuous.chain_windows import Columns, Response, WindowTables, columns_of
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
    """Rounds of R rows; those that are finished stay in the program."""

    def __init__(
        self, program: Program, bound: BoundHead, tables: WindowTables, options: ChainOptions
    ) -> None:
        self.program = program
        self.count = len(bound)
        self.gaussian = options.predictor == "gaussian"
        self.residual = options.residual
        warmth = options.temperature
        numbers = torch.tensor([float(bound.scale), warmth, 2 * float(np.log(warmth))])
        windows = torch.from_numpy(tables.rows)
        assert bound.table is not None, "iterations of few tokens have one"
        self.fixed = (bound.head.weights, bound.table, windows, numbers)

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
        held = torch.tensor([each for _, each in given]).T.contiguous()
        fixed = Fixed(*self.fixed, given[0][0], given[1][0], held)
        made = ChainState(
            *self.program(fixed, self._begin(left, rows), self.gaussian, self.residual)
        )
        k, used, spent, calls = made.counts[left].T.tolist()
        for b, first, second in zip(pictures, used, spent, strict=True):
            normal.skip(b, first)
            log_uniform.skip(b, second)
        state = RowState(*made.rows[left].transpose(0, 1).contiguous().numpy())
        response = Response(*made.response[left].T.contiguous().numpy())
        return ChainRows(k, state, response), calls

    def _numbers(
        self, left: list[int], pictures: list[int], stream: PictureStreams, most: int
    ) -> tuple[Tensor, list[int]]:
        """The next numbers of ``left`` rows [R, ``most``], and how many there are of each row."""
        numbers = torch.zeros(self.count, most)
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
        state = self._spread(left, np.stack(rows.state, axis=1))
        response = self._spread(left, np.stack([rows.response.seen, rows.response.implied], axis=1))
        return ChainState(counts, state, response, going)

    def _spread(self, left: list[int], x: Array) -> Tensor:
        """``x`` of the rows ``left`` among all, of which others are 1."""
        full = torch.ones(self.count, *x.shape[1:])
        full[left] = torch.from_numpy(x)
        return full


def run_rounds(
    fixed: Fixed, begin: ChainState, gaussian: bool, residual: bool
) -> tuple[Tensor, ...]:
    """The state of rows after their rounds; ``ChainOptions`` says what the flags are."""

    def play(
        counts: Tensor, rows: Tensor, response: Tensor, going: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = ChainState(counts, rows, response, going)
        return tuple(_round(fixed, state, gaussian, residual))  # type: ignore[return-value]

    return looped(lambda *state: state[3].any(), play, tuple(begin))


def _round(fixed: Fixed, state: ChainState, gaussian: bool, residual: bool) -> ChainState:
    """One round; a row that needs what is not there stops as it was before."""
    k, used, spent, calls = state.counts.unbind(1)
    steps = len(fixed.modulations)
    drafted = len(fixed.windows) - steps - 1
    width = state.rows.shape[2]
    normals = _next(fixed.normals, used, (drafted + 2 + TRIES[-1]) * width)
    normals = normals.unflatten(1, (-1, width))
    logs = _next(fixed.log_uniforms, spent, drafted + TRIES[-1]).numpy()
    at = k.clamp(max=steps - 1)[:, None] + torch.arange(drafted + 2)
    columns = columns_of(fixed.windows[at].numpy())
    response = Response(*(x.numpy() for x in state.response.unbind(1)))
    noise = normals[:, : drafted + 1] * fixed.numbers[1]
    verified = _verify(fixed, state.rows, response, (at, columns), noise, logs[:, :drafted])
    drafts, p, wider, rejected = verified

    limit = (steps - 1 - k).clamp(min=0, max=drafted)  # drafts that are not beyond the last point
    kept = torch.minimum(_first(rejected), limit)
    step, tries = _next_step(
        verified, kept, limit, normals[:, drafted + 1 :], logs[:, drafted:], residual
    )
    row = torch.arange(len(k)).numpy()
    here = (row, kept.numpy())
    clean = p.mean[here]
    out = columns.gain[row, (kept + 1).numpy()]
    eta = torch.from_numpy(drafts.points[here] + out * step)
    mean, var = clean, np.zeros_like(clean)
    if gaussian:
        excess = np.maximum(np.expm1(wider), 0)
        inside = torch.arange(drafted) < limit[:, None]
        gain = columns.gain[:, 1:-1] * inside[:, :, None].numpy()
        response.observe(gain, drafts.steps, p.mean, excess)
        mean, var = predicted(clean, step, out, excess[here])
    done = k + kept == steps - 1
    eta = torch.where(done[:, None], torch.from_numpy(clean), eta)
    rows = torch.stack([eta, torch.from_numpy(mean), torch.from_numpy(var)], dim=1)
    told = torch.stack([torch.from_numpy(x) for x in (response.seen, response.implied)], dim=1)
    use = drafted + 2 + tries
    counts = torch.stack(
        [k + kept + 1, used + use * width, spent + drafted + tries, calls + 1], dim=1
    )

    sane = (torch.from_numpy(wider).abs() < WIDEST) | (at[:, :-1, None] >= steps)
    served = state.going & (tries <= TRIES[-1])
    moved = served & (counts[:, 1:3] <= fixed.held).all(1) & sane.flatten(1).all(1)
    return ChainState(
        torch.where(moved[:, None], counts, state.counts),
        torch.where(moved[:, None, None], rows, state.rows),
        torch.where(moved[:, None], told, state.response),
        moved & ~done,
    )


def _verify(
    fixed: Fixed,
    rows: Tensor,
    response: Response,
    place: tuple[Tensor, Columns],
    noise: Tensor,
    log_u: Array,
) -> Verified:
    """The windows of ``rows`` at a ``place``: steps ``at`` [R, W + 1] and their columns."""
    at, columns = place
    log_temperature = fixed.numbers[2].numpy()
    state = RowState(*(x.numpy() for x in rows.unbind(1)))
    drafts = draft(state, response.shares(), columns, noise.numpy(), log_temperature)
    x = torch.from_numpy(drafts.points * columns.to_x[:, :-1])
    last = len(fixed.modulations) - 1
    own = fixed.modulations[at[:, :-1].clamp(max=last), torch.arange(len(at))[:, None]]
    eps, v = guided(fixed.weights, x, own, fixed.numbers[0])
    p, wider = target_probs(drafts.points, eps.numpy(), v.numpy(), columns, log_temperature)
    return Verified(drafts, p, wider, rejections(drafts, p, log_u))


def _next_step(
    found: Verified, kept: Tensor, limit: Tensor, normals: Tensor, logs: Array, residual: bool
) -> tuple[Array, Tensor]:
    """Steps [R, C] after ``kept`` drafts [R] of the ``limit`` there are, and the proposals tried:
    the target's, or, unless all are kept, of the residual.
    """
    row = torch.arange(len(kept)).numpy()
    probs = found.p[row, kept.numpy()]
    step = probs.sample(normals[:, 0].numpy())
    if not residual:
        return step, torch.zeros_like(kept)
    q = found.drafts.q
    over = q[row, kept.clamp(max=q.mean.shape[1] - 1).numpy()]
    other, tries = _from_residual(probs, over, normals[:, 1:], logs)
    lost = kept < limit
    return np.where(lost[:, None].numpy(), other, step), torch.where(lost, tries, 0)


def _from_residual(p: Normal, q: Normal, normals: Tensor, logs: Array) -> tuple[Array, Tensor]:
    """As ``draw_residual`` [R, C], and its tries [R]: more than there are where none is good."""
    y = p[:, None].sample(normals.numpy())
    good = logs > -log_ratio(p[:, None], q[:, None], y)
    first = _first(good)
    tries = torch.full_like(first, TRIES[-1] + 1)
    for enough in reversed(TRIES):
        tries = torch.where(first < enough, enough, tries)
    at = first.clamp(max=TRIES[-1] - 1)
    return y[torch.arange(len(at)).numpy(), at.numpy()], tries


def _first(flags: Mask) -> Tensor:
    """By row of ``flags`` [R, N], how many come before the first that is True [R]."""
    count = flags.shape[1]
    return torch.where(torch.from_numpy(flags), torch.arange(count), count).amin(1)


def _next(numbers: Tensor, used: Tensor, count: int) -> Tensor:
    """The ``count`` numbers of each row after those ``used`` [R]; beyond the last, any."""
    at = used[:, None] + torch.arange(count)
    return numbers.gather(1, at.clamp(max=numbers.shape[1] - 1))
