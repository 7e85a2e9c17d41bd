"""CSpD as in its paper: the target sees the drafts before a position, a rejection ends a window.

Source: CSpD (arXiv 2411.11925, section 3). The target's pass over a window has one row for each
drafted iteration, with the tokens drafted before it among its known ones. Pictures accept different
lengths; their rounds are run together. Shape letters: B pictures, L tokens a picture, R rows of a
pass, n tokens of an iteration, N of all rows, S steps, C token width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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

Parts = Mapping[int, Sequence[Iteration]]  # iterations to make, by picture


@torch.inference_mode()
def decode_paper(batch: CSpDBatch, window: DraftWindow) -> Iterator[MARProgress]:
    """Make the pictures of ``batch``, yielding after each pass of the target."""
    run = PaperRun(batch)
    length = batch.orders.shape[1]
    parts = batch.target.settings.iterations(length)
    own = math.ceil(window.prefill * len(parts))
    for part in parts[:own]:
        run.make(batch.target, {b: [part] for b in range(len(batch.orders))})
        yield MARProgress(run.tokens, length - part.first)
    done = [own] * len(batch.orders)
    while min(done) < len(parts):
        wanted = {b: parts[n : n + window.size] for b, n in enumerate(done) if n < len(parts)}
        for b, made in run.round(wanted).items():
            done[b] += made
        yield MARProgress(run.tokens, length - parts[min(done) - 1].first)
    yield run.finish()


@dataclass
class MadeTokens:
    """``tokens`` [n, C] of an iteration at positions ``where`` [n], and how their chains ended."""

    where: Tensor
    tokens: Tensor
    ends: ChainEnd


class PaperRun(CSpDRun):
    """Passes and rounds of several pictures at once."""

    def round(self, parts: Parts) -> dict[int, int]:
        """Draft ``parts``, verify them from left to right; how many of each picture are made."""
        drafts: dict[int, list[MadeTokens]] = {b: [] for b in parts}
        for i in range(max(map(len, parts.values()))):
            now = {b: own[i : i + 1] for b, own in parts.items() if i < len(own)}
            for b, made in self.make(self.batch.draft, now).items():
                drafts[b] += made
        checked = self.compute(self.batch.target, parts)
        return {b: self._verified(b, drafts[b], checked[b]) for b in parts}

    def _verified(self, b: int, drafts: list[MadeTokens], checked: list[MadeTokens]) -> int:
        for n, (made, own) in enumerate(zip(drafts, checked, strict=True), 1):
            if not self.verify(PaperRule(), b, made.where, own.ends, made.ends, last=False).all():
                return n
        return len(drafts)

    def make(self, model: CSpDModel, parts: Parts) -> dict[int, list[MadeTokens]]:
        """Compute ``parts`` by ``model``, and write their tokens."""
        found = self.compute(model, parts)
        for b, made in found.items():
            for part in made:
                self.tokens[b, part.where] = part.tokens
        return found

    def compute(self, model: CSpDModel, parts: Parts) -> dict[int, list[MadeTokens]]:
        """One pass of ``model``: a row for each part, given the tokens before it."""
        own = model is self.batch.target
        with self.clock("verify" if own else "draft"):
            tokens, ends, where = self._pass(model, [(b, p) for b, of in parts.items() for p in of])
        if own:
            self.count(len(parts), sum(map(len, where)))
        sizes = [len(w) for w in where]
        made = map(MadeTokens, where, tokens.split(sizes), _split(ends, sizes))
        return {b: list(islice(made, len(of))) for b, of in parts.items()}

    def _pass(
        self, model: CSpDModel, parts: Sequence[tuple[int, Iteration]]
    ) -> tuple[Tensor, ChainEnd, list[Tensor]]:
        """Tokens [N, C] of all rows, the ends of their chains, and the positions of each row."""
        device = self.orders.device
        rows = torch.tensor([b for b, _ in parts], device=device)
        where = [self.orders[b, part.first : part.last].sort().values for b, part in parts]
        counts = torch.tensor([len(w) for w in where], device=device)
        first = min(part.last for _, part in parts)
        known = self.orders[rows, first:]
        begin = torch.tensor([part.last - first for _, part in parts], device=device)
        valid = torch.arange(known.shape[1], device=device) >= begin[:, None]
        wanted = pad_sequence(where, batch_first=True)  # shorter rows also compute position 0
        classes = model.classes.unflatten(0, (-1, len(self.orders)))[:, rows].flatten(0, 1)
        z = head_conditions(model.model, self.tokens[rows], known, classes, wanted, valid)
        inside = torch.arange(wanted.shape[1], device=device) < counts[:, None]
        z = z[inside.flatten()]  # [N, G, Z]
        noise = self.batch.noise[rows.repeat_interleave(counts), torch.cat(where)].transpose(0, 1)
        scales = torch.tensor([part.scale for _, part in parts], device=device)
        tokens, ends = model.chains(z, scales.repeat_interleave(counts)[:, None], noise)
        return tokens, ends, where


def _split(ends: ChainEnd, counts: Sequence[int]) -> list[ChainEnd]:
    bounds = np.cumsum(counts)[:-1]
    parts = (np.split(t, bounds) for t in (ends.mean, ends.std, ends.log_stds))
    return [ChainEnd(*part) for part in zip(*parts, strict=True)]
