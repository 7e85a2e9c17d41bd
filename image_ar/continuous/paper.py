"""CSpD as its paper describes it: the target sees every draft before a position, and a rejection ends the window.

Source: CSpD (arXiv 2411.11925, section 3). The target's pass over a window has one row for each drafted iteration, with
the tokens drafted before it among its known ones. Pictures accept different lengths and are made one after another.
Shape letters: L tokens a picture, g drafted iterations, N tokens drafted in them, S steps, C token width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specmm.image_ar.continuous.cspd import Side, Window, noise_at, settle, timed
from specmm.image_ar.continuous.decode import ChainStats, Progress, ask, put
from specmm.image_ar.continuous.orders import Iteration, iterations
from specmm.image_ar.continuous.ratios import Dice, Paper, Trace
from specmm.stats import Clock


@torch.inference_mode()
def decode_paper(
    target: Side, draft: Side, order: Tensor, noise: Tensor, dice: Dice, window: Window
) -> Iterator[Progress]:
    """Make one picture in its ``order`` [1, L] from ``noise`` [1, L, S + 1, C], yielding behind each round.

    ``target`` and ``draft`` are bound to one picture. The stats of the last yield are those of the run.
    """
    plan, length, start = target.plan, order.shape[1], time.perf_counter()
    parts = iterations(length, plan.num_iter, plan.cfg, plan.cfg_schedule)
    run = _Paper(target, draft, order, noise, dice)
    done = 0
    while done < len(parts):
        if done < window.prefill * len(parts):
            run.target_makes(parts[done])
            done += 1
        else:
            done += run.round(parts[done : done + window.size])
        yield Progress(run.tokens, length - parts[done - 1].first)
    yield Progress(run.tokens, length, timed(run.stats, run.clock, time.perf_counter() - start, length))


@dataclass
class _Draft:
    """Tokens [n, C] of one iteration at positions ``wanted`` [1, n], and how their chains ended."""

    wanted: Tensor
    tokens: Tensor
    ends: Trace


@dataclass
class _Paper:
    """Tokens [1, L, C] so far."""

    target: Side
    draft: Side
    order: Tensor
    noise: Tensor
    dice: Dice
    tokens: Tensor = field(init=False)
    clock: Clock = field(default_factory=Clock)
    stats: ChainStats = field(default_factory=ChainStats)

    def __post_init__(self) -> None:
        self.tokens = torch.zeros(*self.order.shape, self.noise.shape[-1], device=self.order.device)

    def target_makes(self, part: Iteration) -> None:
        """One iteration by the target itself."""
        with self.clock("verify"):
            made = self._make(self.target, part)
        self._count(len(made.tokens))

    def round(self, parts: list[Iteration]) -> int:
        """Draft the iterations ``parts``, verify them from left to right; how many of them are made."""
        with self.clock("draft"):
            drafts = [self._make(self.draft, part) for part in parts]
        with self.clock("verify"):
            ends = self._score(parts, [d.wanted for d in drafts])
        self._count(sum(len(d.tokens) for d in drafts))
        for n, (made, p) in enumerate(zip(drafts, ends, strict=True)):
            tokens, kept = settle(Paper(), made.tokens.double().cpu().numpy(), p, made.ends, self.dice, last=False)
            put(self.tokens, made.wanted, torch.from_numpy(tokens).to(self.tokens))
            self.stats.drafted += len(kept)
            self.stats.accepted += int(kept.sum())
            if not kept.all():
                return n + 1
        return len(parts)

    def _make(self, side: Side, part: Iteration) -> _Draft:
        wanted = self.order[:, part.first : part.last].sort(-1).values
        z = side.ask(self.tokens, self.order[:, part.last :], wanted)
        tokens, ends = side.chains(z, part.scale, noise_at(self.noise, wanted))
        put(self.tokens, wanted, tokens)
        return _Draft(wanted, tokens, ends)

    def _score(self, parts: list[Iteration], wanted: list[Tensor]) -> list[Trace]:
        """How the target's chains end at every drafted position, given what was drafted before it."""
        first, device = parts[-1].last, self.order.device
        known = self.order[:, first:].expand(len(parts), -1)
        seen_from = torch.tensor([part.last - first for part in parts], device=device)
        valid = torch.arange(known.shape[1], device=device) >= seen_from[:, None]
        every, counts = torch.cat(wanted, dim=1), [w.shape[1] for w in wanted]
        condition = self.target.condition.repeat_interleave(len(parts), 0)
        tokens, places = (x.expand(len(parts), *x.shape[1:]) for x in (self.tokens, every))
        z = ask(self.target.model, tokens, known, condition, places, valid).unflatten(0, places.shape)  # [g, N, G, Z]
        rows = torch.repeat_interleave(torch.arange(len(parts), device=device), torch.tensor(counts, device=device))
        own = z[rows, torch.arange(len(rows), device=device)]
        scale = torch.tensor([part.scale for part in parts], device=device)[rows][:, None]
        _, ends = self.target.chains(own, scale, noise_at(self.noise, every))
        return _split(ends, counts)

    def _count(self, tokens: int) -> None:
        self.stats.rounds += 1
        self.stats.head_calls += len(self.target.steps.keep) * tokens


def _split(ends: Trace, counts: list[int]) -> list[Trace]:
    """``ends`` of N tokens, iteration by iteration."""
    bounds = np.cumsum(counts)[:-1]
    parts = (np.split(t, bounds) for t in (ends.mean, ends.std, ends.log_stds))
    return [Trace(*part) for part in zip(*parts, strict=True)]
