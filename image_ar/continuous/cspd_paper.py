"""CSpD as in its paper: the target sees the drafts before a position, a rejection ends a window.

Source: CSpD (arXiv 2411.11925, section 3). The target's pass over a window has one row for each
drafted iteration, with the tokens drafted before it among its known ones. Pictures accept different
lengths: each is a coroutine that yields what it needs next of which model, and requests to the same
model at the same time are one pass. Shape letters: B pictures, L tokens a picture, R rows of a
pass, n tokens of an iteration, N of all rows, S steps, C token width.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specmm.image_ar.continuous.cspd import (
    ChainEnd,
    CSpDBatch,
    CSpDModel,
    CSpDRun,
    DraftWindow,
    PaperRule,
)
from specmm.image_ar.continuous.masked_decode import MARProgress, head_conditions
from specmm.image_ar.continuous.orders import Iteration


@torch.inference_mode()
def decode_paper(batch: CSpDBatch, window: DraftWindow) -> Iterator[MARProgress]:
    """Make the pictures of ``batch``, yielding after each pass of the target."""
    run = PaperRun(batch, window)
    for _ in run.play({b: run.picture(b) for b in range(len(batch.orders))}):
        yield MARProgress(run.tokens, batch.orders.shape[1] - max(run.left))
    yield run.finish()


@dataclass
class _Made:
    """``tokens`` [n, C] of an iteration at positions ``where`` [n], and how their chains ended."""

    where: Tensor
    tokens: Tensor
    ends: ChainEnd


@dataclass(frozen=True)
class _Request:
    """Picture ``b`` needs the tokens of ``parts`` by ``model``, each given those before it."""

    model: CSpDModel
    b: int
    parts: Sequence[Iteration]


_Picture = Generator[_Request, list[_Made], None]


class PaperRun(CSpDRun):
    """A run in which ``left`` tokens of each picture are still to be made."""

    def __init__(self, batch: CSpDBatch, window: DraftWindow) -> None:
        super().__init__(batch)
        self.window = window
        self.parts = batch.target.settings.iterations(batch.orders.shape[1])
        self.left = [batch.orders.shape[1]] * len(batch.orders)

    def play(self, pictures: dict[int, _Picture]) -> Iterator[None]:
        """Run the ``pictures`` until all are made, yielding after each pass of the target."""
        requests = {b: next(picture) for b, picture in pictures.items()}
        while requests:
            for model, name in ((self.batch.draft, "draft"), (self.batch.target, "verify")):
                now = [request for request in requests.values() if request.model is model]
                if not now:
                    continue
                with self.clock(name):
                    answers = self._answer(model, now)
                for request, made in zip(now, answers, strict=True):
                    following = _next(pictures[request.b], made)
                    if following is None:
                        del requests[request.b]
                    else:
                        requests[request.b] = following
                if name == "verify":
                    tokens = sum(len(made.tokens) for answer in answers for made in answer)
                    self.count(len(answers), tokens)
                    yield

    def picture(self, b: int) -> _Picture:
        """All iterations of picture ``b``."""
        done = 0
        own = self.window.prefill * len(self.parts)
        while done < len(self.parts):
            if done < own:
                [made] = yield _Request(self.batch.target, b, [self.parts[done]])
                self.tokens[b, made.where] = made.tokens
                done += 1
            else:
                done += yield from self.round(b, self.parts[done : done + self.window.size])
            self.left[b] = self.parts[done - 1].first

    def round(self, b: int, parts: Sequence[Iteration]) -> Generator[_Request, list[_Made], int]:
        """Draft ``parts`` of picture ``b``, verify them left to right; how many are made."""
        drafts = []
        for part in parts:
            [made] = yield _Request(self.batch.draft, b, [part])
            self.tokens[b, made.where] = made.tokens
            drafts.append(made)
        checked = yield _Request(self.batch.target, b, parts)
        for n, (made, own) in enumerate(zip(drafts, checked, strict=True)):
            kept = self.verify(PaperRule(), b, made.where, own.ends, made.ends, last=False)
            if not kept.all():
                return n + 1
        return len(parts)

    def _answer(self, model: CSpDModel, requests: Sequence[_Request]) -> list[list[_Made]]:
        """One pass of ``model``: a row for each part of each request."""
        device = self.orders.device
        wanted_by = [(r.b, part) for r in requests for part in r.parts]
        rows = torch.tensor([b for b, _ in wanted_by], device=device)
        where = [self.orders[b, part.first : part.last].sort().values for b, part in wanted_by]
        counts = torch.tensor([len(w) for w in where], device=device)
        first = min(part.last for _, part in wanted_by)
        known = self.orders[rows, first:]
        begin = torch.tensor([part.last - first for _, part in wanted_by], device=device)
        valid = torch.arange(known.shape[1], device=device) >= begin[:, None]
        wanted = pad_sequence(where, batch_first=True)  # shorter rows also compute position 0
        classes = model.classes.unflatten(0, (-1, len(self.orders)))[:, rows].flatten(0, 1)
        z = head_conditions(model.model, self.tokens[rows], known, classes, wanted, valid)
        inside = torch.arange(wanted.shape[1], device=device) < counts[:, None]
        z = z[inside.flatten()]  # [N, G, Z]
        noise = self.batch.noise[rows.repeat_interleave(counts), torch.cat(where)].transpose(0, 1)
        scales = torch.tensor([part.scale for _, part in wanted_by], device=device)
        tokens, ends = model.chains(z, scales.repeat_interleave(counts)[:, None], noise)
        sizes = counts.tolist()
        made = map(_Made, where, tokens.split(sizes), _split(ends, sizes))
        return [list(islice(made, len(r.parts))) for r in requests]


def _next(picture: _Picture, answer: list[_Made]) -> _Request | None:
    """The next request of ``picture`` after its ``answer``; None when it is made."""
    try:
        return picture.send(answer)
    except StopIteration:
        return None


def _split(ends: ChainEnd, counts: Sequence[int]) -> list[ChainEnd]:
    bounds = np.cumsum(counts)[:-1]
    parts = (np.split(t, bounds) for t in (ends.mean, ends.std, ends.log_stds))
    return [ChainEnd(*part) for part in zip(*parts, strict=True)]
