"""Speculation along denoising chains as a program: rounds go on until all rows are finished.

It plays the rounds of :mod:`specmm.image_ar.continuous.chain_speculation` on the same numbers, of
pictures with as many rows each. Where a picture's numbers end, more are drawn in the order in which
that module would draw them, for a generator gives both streams. A round whose residual needs more
proposals than a program has is left to that module. Shape letters as there; B pictures of n rows,
R = B·n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
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

MOST = (16_384, 1024)  # normal numbers and uniforms that a program is given for each row
TRIES = tuple(accumulate(FIRST_TRIES * 4**turn for turn in range(3)))  # of a residual, after turns


class ChainState(NamedTuple):
    """``counts`` [R, 2] int64: a row's step (S: it is finished) and its head calls. ``drawn`` int64
    [B, 2]: the numbers that pictures have used of both streams. ``rows`` [R, 3, C]: their
    ``RowState``; a finished row's η is its token. ``response`` [R, 2]. ``short`` [B, 2] int64:
    which stream ended first in the round at which a picture stopped, 1 or 2, else 0, and the
    numbers wanted of it at once. And whether a row is ``going`` [R] on.
    """

    counts: Tensor
    drawn: Tensor
    rows: Tensor
    response: Tensor
    short: Tensor
    going: Tensor


class Fixed(NamedTuple):
    """What does not change: the head's ``weights`` and ``modulations`` [S, R, G, F], ``windows``
    (``WindowTables``), guidance, temperature and the log of its square (``numbers`` [3]), the
    pictures' next ``normals`` and ``log_uniforms`` [B, ...] and how many there are (``held`` [B,
    2]).
    """

    weights: HeadWeights
    modulations: Tensor
    windows: Tensor
    numbers: Tensor
    normals: Tensor
    log_uniforms: Tensor
    held: Tensor


class ChainProgram:
    """Rounds of the rows of so many ``pictures`` by ``run``, which does what :func:`run_rounds`
    does; those that are finished stay in the program.
    """

    def __init__(
        self,
        run: Callable[[Fixed, ChainState, bool], tuple[Tensor, ...]],
        bound: BoundHead,
        tables: WindowTables,
        options: ChainOptions,
        pictures: int,
    ) -> None:
        self.run = run
        self.count = len(bound)
        self.batch = pictures
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
        """``rows``, which are the rows ``left`` of all, of ``pictures``, after as many rounds as it
        can play, and how many rounds each took part in.
        """
        there = sorted(set(pictures))
        streams = (normal, log_uniform)
        state = self._begin(left, rows)
        while True:
            numbers = [self._numbers(there, *s) for s in zip(streams, MOST, strict=True)]
            held = torch.tensor([each for _, each in numbers], device=self.device).T.contiguous()
            fixed = Fixed(*self.fixed, numbers[0][0], numbers[1][0], held)
            found = self.run(fixed, state, self.residual)
            made = ChainState(*(part.cpu() for part in found))
            if not self._drawn(there, made, streams, held.tolist()):
                break
            state = self._again(ChainState(*found))
        k, calls = made.counts[left].T.tolist()
        eta, mean, var = made.rows[left].transpose(0, 1).contiguous().numpy()
        response = Response(*made.response[left].T.contiguous().numpy())
        return ChainRows(k, RowState(eta, mean, var), response), calls

    def _numbers(
        self, pictures: list[int], stream: PictureStreams, each: int
    ) -> tuple[Tensor, list[int]]:
        """The next numbers of ``pictures`` [B, n · ``each``], and how many there are of each."""
        most = self._most(each)
        numbers = torch.zeros(self.batch, most, device=self.device)
        held = [0] * self.batch
        for b in pictures:
            ahead = stream.ahead(b, most)
            numbers[b, : len(ahead)] = ahead
            held[b] = len(ahead)
        return numbers, held

    def _most(self, each: int) -> int:
        return self.count // self.batch * each

    def _drawn(
        self,
        pictures: list[int],
        made: ChainState,
        streams: tuple[PictureStreams, PictureStreams],
        held: list[list[int]],
    ) -> bool:
        """Count what was drawn, and draw more where numbers ended; whether a picture may go on: not
        where what is handed over at most is too little for a round.
        """
        used, short = made.drawn.tolist(), made.short.tolist()
        goes_on = False
        for b in pictures:
            for stream, count in zip(streams, used[b], strict=True):
                stream.skip(b, count)
            ended, wanted = short[b][0] - 1, short[b][1]
            if ended >= 0 and held[b][ended] < self._most(MOST[ended]):
                streams[ended].draw_ahead(b, wanted)
                goes_on = True
            goes_on |= ended >= 0 and any(used[b])
        return goes_on

    def _again(self, state: ChainState) -> ChainState:
        """``state`` with its rows going on with new numbers."""
        steps = len(self.fixed[1])
        return state._replace(
            drawn=torch.zeros_like(state.drawn),
            short=torch.zeros_like(state.short),
            going=state.counts[:, 0] < steps,
        )

    def _begin(self, left: list[int], rows: ChainRows) -> ChainState:
        counts = torch.zeros(self.count, 2, dtype=torch.int64)
        counts[:, 0] = len(self.fixed[1])
        counts[left, 0] = torch.tensor(rows.k)
        drawn = torch.zeros(self.batch, 2, dtype=torch.int64)
        going = torch.zeros(self.count, dtype=torch.bool)
        going[left] = True
        state = self._spread(left, torch.stack([torch.from_numpy(x) for x in rows.state], 1))
        told = (rows.response.seen, rows.response.implied)
        response = self._spread(left, torch.stack([torch.from_numpy(x) for x in told], 1))
        made = ChainState(counts, drawn, state, response, drawn.clone(), going)
        return ChainState(*(part.to(self.device) for part in made))

    def _spread(self, left: list[int], x: Tensor) -> Tensor:
        """``x`` of the rows ``left`` among all, of which others are 1."""
        full = torch.ones(self.count, *x.shape[1:])
        full[left] = x
        return full


def run_rounds(fixed: Fixed, begin: ChainState, residual: bool) -> tuple[Tensor, ...]:
    """The state of rows after their rounds; ``residual`` is that of ``ChainOptions``."""

    def play(*state: Tensor) -> tuple[Tensor, ...]:
        return tuple(play_round(fixed, ChainState(*state), residual))

    return looped(lambda *state: state[-1].any(), play, tuple(begin))


def play_round(fixed: Fixed, state: ChainState, residual: bool) -> ChainState:
    """One round; the rows of a picture that needs what is not there stop as they were before."""
    k, calls = state.counts.unbind(1)
    steps = len(fixed.modulations)
    drafted = len(fixed.windows) - steps - 1
    width = state.rows.shape[2]
    going = state.going.view(len(state.drawn), -1)
    numbers = Numbers(fixed, state.drawn)
    at = k.clamp(max=steps - 1)[:, None] + _range(drafted + 2, k)
    columns = columns_of(fixed.windows[at])
    response = Response(*state.response.unbind(1))
    noise = numbers.normals(going, (drafted + 1) * width).unflatten(1, (-1, width))
    log_u = numbers.log_uniforms(going, drafted)
    noise = noise * fixed.numbers[1]
    verified = _verify(fixed, state.rows, response, (at, columns), noise, log_u)
    drafts, p, wider, rejected = verified

    limit = (steps - 1 - k).clamp(min=0, max=drafted)  # drafts that are not beyond the last point
    kept = torch.minimum(_first(rejected), limit)
    row = _range(len(k), k)
    probs = p[row, kept]
    step = probs.sample(numbers.normals(going, width))
    lost = torch.zeros_like(going)
    if residual:
        lost = going & (kept < limit).view_as(going)
        over = drafts.q[row, kept.clamp(max=drafted - 1)]
        step, lost = _from_residual(probs, over, step, lost, numbers)
    clean = probs.mean
    out = columns.gain[row, kept + 1]
    eta = drafts.points[row, kept] + out * step
    excess = clamped(torch.expm1(wider), 0.0)
    inside = _range(drafted, k) < limit[:, None]
    response.observe(columns.gain[:, 1:-1] * inside[:, :, None], drafts.steps, p.mean, excess)
    mean, var = predicted(clean, step, out, excess[row, kept])
    done = k + kept == steps - 1
    eta = torch.where(done[:, None], clean, eta)
    moved = ChainState(
        torch.stack([k + kept + 1, calls + 1], dim=1),
        torch.stack(numbers.used, dim=1),
        torch.stack([eta, mean, var], dim=1),
        torch.stack([response.seen, response.implied], dim=1),
        numbers.short,
        ~done,
    )
    sane = ((wider.abs() < WIDEST) | (at[:, :-1, None] >= steps)).flatten(1).all(1)
    served = (~going | (sane.view_as(going) & ~lost)).all(1) & (numbers.short[:, 0] == 0)
    return _moved(state, moved, served, going)


def _moved(before: ChainState, after: ChainState, served: Tensor, going: Tensor) -> ChainState:
    """Pictures ``served`` [B] and their rows ``going`` [B, n] as they are ``after`` a round, others
    as ``before`` it and stopped.
    """
    which = (going & served[:, None]).flatten()
    return ChainState(
        torch.where(which[:, None], after.counts, before.counts),
        torch.where(served[:, None], after.drawn, before.drawn),
        torch.where(which[:, None, None], after.rows, before.rows),
        torch.where(which[:, None], after.response, before.response),
        torch.where(going.any(1, keepdim=True), after.short, before.short),
        which & after.going,
    )


class Numbers:
    """The streams of pictures, of which ``used`` (two of [B]) numbers are: a picture's rows take
    theirs in their order. ``short`` [B, 2] as in :class:`ChainState`.
    """

    def __init__(self, fixed: Fixed, drawn: Tensor) -> None:
        self.streams = (fixed.normals, fixed.log_uniforms)
        self.held = fixed.held.unbind(1)
        self.used = list(drawn.unbind(1))
        self.short = torch.zeros_like(drawn)

    def normals(self, rows: Tensor, count: int) -> Tensor:
        """The next ``count`` normal numbers [R, count] of each of the ``rows`` [B, n] that take
        some; of others, and beyond the last, any.
        """
        return self._take(0, rows, count)

    def log_uniforms(self, rows: Tensor, count: int) -> Tensor:
        """As ``normals``, of the other stream."""
        return self._take(1, rows, count)

    def _take(self, i: int, rows: Tensor, count: int) -> Tensor:
        stream = self.streams[i]
        taking = rows.long()
        first = self.used[i][:, None] + (taking.cumsum(1) - taking) * count  # [B, n]
        at = first[:, :, None] + _range(count, rows)
        wanted = taking.sum(1) * count
        self.used[i] = self.used[i] + wanted
        ended = (self.used[i] > self.held[i]) & (self.short[:, 0] == 0)
        told = torch.stack([torch.full_like(wanted, i + 1), wanted], dim=1)
        self.short = torch.where(ended[:, None], told, self.short)
        found = stream.gather(1, at.flatten(1).clamp(max=stream.shape[1] - 1))
        return found.view(-1, count)


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


def _from_residual(
    p: Normal, q: Normal, step: Tensor, lost: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor]:
    """``step`` [R, C], for the rows ``lost`` [B, n] one of the residual of ``p`` over ``q``, as
    ``draw_residual``'s; and the rows that would need more proposals than there are.
    """
    row = _range(len(step), step)
    width = step.shape[1]
    for tries in (b - a for a, b in pairwise((0, *TRIES))):
        y = p[:, None].sample(numbers.normals(lost, tries * width).unflatten(1, (-1, width)))
        good = numbers.log_uniforms(lost, tries) > -log_ratio(p[:, None], q[:, None], y)
        first = _first(good)
        hit = lost.flatten() & (first < tries)
        step = torch.where(hit[:, None], y[row, first.clamp(max=tries - 1)], step)
        lost = lost & ~hit.view_as(lost)
    return step, lost


def _first(flags: Tensor) -> Tensor:
    """By row of ``flags`` [R, N], how many come before the first that is True [R]."""
    count = flags.shape[1]
    return torch.where(flags, _range(count, flags), count).amin(1)


def _range(count: int, where: Tensor) -> Tensor:
    """0 to ``count`` - 1, on the device of ``where``."""
    return torch.arange(count, device=where.device)
