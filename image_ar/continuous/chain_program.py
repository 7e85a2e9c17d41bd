"""Speculation along denoising chains as a compiled program, which runs rounds until all rows end.

It runs the rounds of :mod:`specmm.image_ar.continuous.chain_round` with the same random numbers
that the host would use, for pictures of equally many rows. When a picture's numbers run out, the
host draws more, in the order of its own rounds, because one generator feeds both streams. The host
also runs a round whose residual needs more proposals than the program holds. Shape letters as in
that module; B pictures of n rows, R = B·n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from specmm.image_ar.continuous.chain_round import (
    TURNS,
    WIDEST,
    ChainRows,
    Mask,
    Normal,
    play_round,
)
from specmm.image_ar.continuous.chain_windows import (
    Array,
    Columns,
    WindowTables,
    arange,
    columns_of,
)
from specmm.image_ar.continuous.diffusion_head import BoundHead, HeadWeights, guided
from specmm.image_ar.continuous.orders import PictureStreams
from specmm.programs.compiled import looped

MOST = (16_384, 1024)  # normal numbers and uniforms that a program is given for each row
PROPOSED = 3  # turns of a residual


State: TypeAlias = tuple[Tensor, ...]
"""``drawn`` [B, 2] int64: the numbers that pictures have used of both streams. ``short`` [B, 2]
int64: which stream ended first in the round at which a picture stopped, 1 or 2, else 0, and the
numbers wanted of it at once. Whether a row is ``going`` [R] on. And the ``ChainRows``.
"""


class Fixed(NamedTuple):
    """Inputs that rounds do not change: the head's ``weights`` and ``modulations`` [S, R, G, F],
    ``windows`` (``WindowTables``), guidance, temperature and the log of its square (``numbers``
    [3]), the pictures' next ``normals`` and ``log_uniforms`` [B, ...] and their counts (``held``
    [B, 2]).
    """

    weights: HeadWeights
    modulations: Tensor
    windows: Tensor
    numbers: Tensor
    normals: Tensor
    log_uniforms: Tensor
    held: Tensor


class ChainProgram:
    """Speculation for ``pictures`` pictures at a time. ``run`` runs the rounds: :func:`run_rounds`
    or its compiled form.
    """

    def __init__(
        self,
        run: Callable[[Fixed, State], State],
        bound: BoundHead,
        tables: WindowTables,
        temperature: float,
        pictures: int,
    ) -> None:
        self.run = run
        self.each = len(bound) // pictures
        self.batch = pictures
        self.steps = tables.steps
        options = float(bound.scale), temperature, 2 * math.log(temperature)
        numbers = torch.tensor(options, dtype=torch.float32)
        windows = torch.from_numpy(tables.rows)
        assert bound.table is not None, "iterations of few tokens have one"
        self.fixed = (bound.head.weights, bound.table, windows, numbers)

    def __call__(self, rows: list[Tensor], streams: tuple[PictureStreams, PictureStreams]) -> None:
        """Advance ``rows``, tensors of ``ChainRows``, in place by all rounds a program can run."""
        unfinished = (rows[0] < self.steps).view(self.batch, -1).any(1)
        live = unfinished.nonzero().flatten().tolist()
        moved = rows
        goes_on = True
        while goes_on:
            numbers = [self._numbers(live, *s) for s in zip(streams, MOST, strict=True)]
            stored = torch.tensor([row_numbers for _, row_numbers in numbers]).T.contiguous()
            fixed = Fixed(*self.fixed, numbers[0][0], numbers[1][0], stored)
            none = torch.zeros(stored.shape, dtype=stored.dtype)  # not of its strides
            state = none, none.clone(), moved[0] < self.steps, *moved
            drawn, short, _, *moved = self.run(fixed, state)
            goes_on = self._drawn(live, drawn.tolist(), short.tolist(), streams, stored.tolist())
        for x, value in zip(rows, moved, strict=True):
            x.copy_(value)

    def _numbers(
        self, pictures: list[int], stream: PictureStreams, each: int
    ) -> tuple[Tensor, list[int]]:
        """The next numbers of ``pictures`` [B, n · ``each``] from ``stream``, and their counts."""
        most = self.each * each
        numbers = torch.zeros(self.batch, most, dtype=torch.float32)
        stored = [0] * self.batch
        for b in pictures:
            ahead = stream.ahead(b, most)
            numbers[b, : len(ahead)] = ahead
            stored[b] = len(ahead)
        return numbers, stored

    def _drawn(
        self,
        pictures: list[int],
        used: list[list[int]],
        short: list[list[int]],
        streams: tuple[PictureStreams, PictureStreams],
        stored: list[list[int]],
    ) -> bool:
        """Count the numbers used, and draw more where they ran out. Returns whether any picture can
        continue: not if a round needs more numbers than a program can hold.
        """
        goes_on = False
        for b in pictures:
            for stream, count in zip(streams, used[b], strict=True):
                stream.skip(b, count)
            ended, wanted = short[b][0] - 1, short[b][1]
            if ended >= 0 and stored[b][ended] < self.each * MOST[ended]:
                streams[ended].draw_ahead(b, wanted)
                goes_on = True
            goes_on |= ended >= 0 and any(used[b])
        return goes_on


def run_rounds(fixed: Fixed, begin: State) -> State:
    """The state of rows after all their rounds."""

    def play(*state: Tensor) -> State:
        return next_state(fixed, state)

    return looped(lambda *state: state[2].any(), play, begin)


def next_state(fixed: Fixed, state: State) -> State:
    """The state after one round. Rows that are not running do not change; nor do the rows of a
    picture that lacks random numbers for the round, which then stop.
    """
    drawn, short, on, *parts = state
    rows = ChainRows(*parts)
    going = on.view(len(drawn), -1)
    chain = _GivenChain(fixed)
    numbers = _GivenNumbers(fixed, drawn, going)
    following = play_round(chain, rows, numbers)
    short = torch.where(going.any(1, keepdim=True), numbers.short, short)
    served = (~going | (chain.sane & ~chain.lost).view_as(going)).all(1) & (short[:, 0] == 0)
    drawn = torch.where(served[:, None], torch.stack(numbers.used, 1), drawn)
    which = (going & served[:, None]).flatten()
    kept = [
        torch.where(which if x.ndim == 1 else which[:, None], x, before)
        for x, before in zip(following, rows, strict=True)
    ]
    return drawn, short, which & (following.k < chain.steps), *kept


class _GivenChain:
    """A :class:`~specmm.image_ar.continuous.chain_round.Chain` with the ``fixed`` tensors."""

    def __init__(self, fixed: Fixed) -> None:
        self.fixed = fixed
        self.steps = len(fixed.modulations)
        self.window = len(fixed.windows) - self.steps
        self.scale, self.temperature, self.log_temperature = fixed.numbers.unbind()
        self.lost = fixed.held.new_zeros((), dtype=torch.bool)

    def columns(self, k: Array) -> Columns:
        self.at = k.clamp(max=self.steps - 1)[:, None] + arange(self.window + 1, k)
        return columns_of(self.fixed.windows[self.at])

    def answers(self, k: Array, x: Array) -> tuple[Array, Array]:
        at = self.at[:, :-1].clamp(max=self.steps - 1)
        modulations = self.fixed.modulations[at, arange(len(at), at)[:, None]]
        return guided(self.fixed.weights, x, modulations, self.scale)

    def look(self, p: Normal, wider: Array, k: Array) -> None:
        beyond = self.at[:, :-1, None] >= self.steps
        self.sane = ((wider.abs() < WIDEST) | beyond).flatten(1).all(1)

    def lack(self, lost: Mask) -> None:
        self.lost = lost


class _GivenNumbers:
    """Random numbers from ``fixed`` streams, with the counts ``used`` of each (two of [B]). A
    picture's rows that are ``going`` [B, n] take them in order. ``short`` [B, 2] as in ``State``.
    """

    def __init__(self, fixed: Fixed, drawn: Tensor, going: Tensor) -> None:
        self.turns = TURNS[:PROPOSED]
        self.streams = (fixed.normals, fixed.log_uniforms)
        self.held = fixed.held.unbind(1)
        self.used = list(drawn.unbind(1))
        self.short = torch.zeros_like(drawn)
        self.going = going

    def normals(self, rows: Mask | None, count: int) -> Array:
        """See ``Numbers``; values for other rows, and past the end of a stream, are arbitrary."""
        return self._take(0, rows, count)

    def log_uniforms(self, rows: Mask | None, count: int) -> Array:
        """As ``normals``."""
        return self._take(1, rows, count)

    def chosen(self, rows: Mask) -> Any:
        """All rows: a program cannot choose rows on the host."""
        return slice(None)

    def needed(self, rows: Mask) -> bool:
        return True

    def _take(self, i: int, rows: Mask | None, count: int) -> Tensor:
        """The next ``count`` numbers of stream ``i`` for ``rows``; notes if they run out."""
        stream = self.streams[i]
        taking = (self.going if rows is None else self.going & rows.view_as(self.going)).long()
        first = self.used[i][:, None] + (taking.cumsum(1) - taking) * count  # [B, n]
        at = first[:, :, None] + arange(count, first)
        total = taking.sum(1) * count
        self.used[i] = self.used[i] + total
        ended = (self.used[i] > self.held[i]) & (self.short[:, 0] == 0)
        wanted_rows = torch.stack([torch.full_like(total, i + 1), total], dim=1)
        self.short = torch.where(ended[:, None], wanted_rows, self.short)
        numbers = stream.gather(1, at.flatten(1).clamp(max=stream.shape[1] - 1))
        return numbers.view(-1, count)
