"""CSpD as its paper describes it: the target sees every draft before a position, and a rejection
ends the window.

Source: CSpD (arXiv 2411.11925, section 3). The target's pass over a window has one row for each
drafted iteration, with the tokens drafted before it among its known ones. Pictures accept different
lengths: each is a coroutine that says what it asks next of which model, and what they ask of the
same one at the same time is one pass. Shape letters: B pictures, L tokens a picture, R rows of a
pass, n tokens of an iteration, N of all rows, S steps, C token width.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specmm.image_ar.continuous.cspd import Side, Window, settle, timed
from specmm.image_ar.continuous.decode import ChainStats, Progress, ask
from specmm.image_ar.continuous.orders import Iteration, iterations
from specmm.image_ar.continuous.ratios import Paper, PictureNumbers, Trace
from specmm.stats import Clock


@torch.inference_mode()
def decode_paper(
    target: Side,
    draft: Side,
    orders: Tensor,
    noise: Tensor,
    numbers: Sequence[PictureNumbers],
    window: Window,
) -> Iterator[Progress]:
    """Make pictures in their ``orders`` [B, L] from ``noise`` [B, L, S + 1, C], yielding after each
    of the target's passes. The stats of the last yield are those of the run.
    """
    start, run = time.perf_counter(), _Run(target, draft, orders, noise, numbers, window)
    for _ in run.play({b: run.picture(b) for b in range(len(orders))}):
        yield Progress(run.tokens, orders.shape[1] - max(run.left))
    yield Progress(
        run.tokens,
        orders.shape[1],
        timed(run.stats, run.clock, time.perf_counter() - start, orders.numel()),
    )


@dataclass
class _Made:
    """``tokens`` [n, C] of an iteration at positions ``where`` [n], and how their chains ended."""

    where: Tensor
    tokens: Tensor
    ends: Trace


@dataclass(frozen=True)
class _Request:
    """Picture ``b`` asks ``side`` for the tokens of ``parts``, each given what the picture holds
    before it.
    """

    side: Side
    b: int
    parts: Sequence[Iteration]


_Playing = Generator[_Request, list[_Made], None]


class _Run:
    """``tokens`` [B, L, C] so far, and how many of each picture are ``left``."""

    def __init__(
        self,
        target: Side,
        draft: Side,
        orders: Tensor,
        noise: Tensor,
        numbers: Sequence[PictureNumbers],
        window: Window,
    ) -> None:
        self.target, self.draft, self.orders, self.noise, self.numbers = (
            target,
            draft,
            orders,
            noise,
            numbers,
        )
        self.window, plan = window, target.plan
        self.parts = iterations(orders.shape[1], plan.num_iter, plan.cfg, plan.cfg_schedule)
        self.tokens = torch.zeros(*orders.shape, noise.shape[-1], device=orders.device)
        self.left = [orders.shape[1]] * len(orders)
        self.clock, self.stats = Clock(), ChainStats()

    def play(self, pictures: dict[int, _Playing]) -> Iterator[None]:
        """Answer the ``pictures`` until all are made, yielding after each pass of the target."""
        asked = {b: next(picture) for b, picture in pictures.items()}
        while asked:
            for side, name in ((self.draft, "draft"), (self.target, "verify")):
                now = [request for request in asked.values() if request.side is side]
                if not now:
                    continue
                with self.clock(name):
                    answers = self._answer(side, now)
                for request, made in zip(now, answers, strict=True):
                    if (more := _next(pictures[request.b], made)) is None:
                        del asked[request.b]
                    else:
                        asked[request.b] = more
                if side is self.target:
                    self._count(answers)
                    yield

    def picture(self, b: int) -> _Playing:
        """All iterations of picture ``b``."""
        done, own = 0, self.window.prefill * len(self.parts)
        while done < len(self.parts):
            if done < own:
                [made] = yield _Request(self.target, b, [self.parts[done]])
                self.tokens[b, made.where] = made.tokens
                done += 1
            else:
                done += yield from self.round(b, self.parts[done : done + self.window.size])
            self.left[b] = self.parts[done - 1].first

    def round(self, b: int, parts: Sequence[Iteration]) -> Generator[_Request, list[_Made], int]:
        """Draft ``parts`` of picture ``b``, verify them from left to right; how many of them are
        made.
        """
        drafts = []
        for part in parts:
            [made] = yield _Request(self.draft, b, [part])
            self.tokens[b, made.where] = made.tokens
            drafts.append(made)
        checked = yield _Request(self.target, b, parts)
        for n, (made, own) in enumerate(zip(drafts, checked, strict=True)):
            drafted = made.tokens.double().cpu().numpy()
            tokens, kept = settle(
                Paper(), drafted, own.ends, made.ends, self.numbers[b], last=False
            )
            self.tokens[b, made.where] = torch.from_numpy(tokens).to(self.tokens)
            self.stats.drafted += len(kept)
            self.stats.accepted += int(kept.sum())
            if not kept.all():
                return n + 1
        return len(parts)

    def _answer(self, side: Side, requests: Sequence[_Request]) -> list[list[_Made]]:
        """One pass of ``side``: a row for each part of each request."""
        asked, device = [(r.b, part) for r in requests for part in r.parts], self.orders.device
        rows = torch.tensor([b for b, _ in asked], device=device)
        where = [self.orders[b, part.first : part.last].sort().values for b, part in asked]
        counts = torch.tensor([len(w) for w in where], device=device)
        first = min(part.last for _, part in asked)
        known = self.orders[rows, first:]
        begin = torch.tensor([part.last - first for _, part in asked], device=device)
        valid = torch.arange(known.shape[1], device=device) >= begin[:, None]
        wanted = pad_sequence(
            where, batch_first=True
        )  # a row that wants fewer asks for position 0, too
        condition = side.condition.unflatten(0, (-1, len(self.orders)))[:, rows].flatten(0, 1)
        z = ask(side.model, self.tokens[rows], known, condition, wanted, valid)
        z = z[
            (torch.arange(wanted.shape[1], device=device) < counts[:, None]).flatten()
        ]  # [N, G, Z]
        noise = self.noise[rows.repeat_interleave(counts), torch.cat(where)].transpose(0, 1)
        scale = torch.tensor([part.scale for _, part in asked], device=device).repeat_interleave(
            counts
        )[:, None]
        tokens, ends = side.chains(z, scale, noise)
        sizes = counts.tolist()
        made = map(_Made, where, tokens.split(sizes), _split(ends, sizes))
        return [list(islice(made, len(r.parts))) for r in requests]

    def _count(self, answers: Sequence[Sequence[_Made]]) -> None:
        tokens = sum(len(made.tokens) for answer in answers for made in answer)
        self.stats.rounds += len(answers)
        self.stats.head_calls += len(self.target.steps.keep) * tokens


def _next(picture: _Playing, answer: list[_Made]) -> _Request | None:
    """What ``picture`` asks once it has its ``answer``; None when it is made."""
    try:
        return picture.send(answer)
    except StopIteration:
        return None


def _split(ends: Trace, counts: Sequence[int]) -> list[Trace]:
    """``ends`` of N tokens, row by row."""
    bounds = np.cumsum(counts)[:-1]
    parts = (np.split(t, bounds) for t in (ends.mean, ends.std, ends.log_stds))
    return [Trace(*part) for part in zip(*parts, strict=True)]
