"""Continuous speculative decoding between two MAR models: as its release runs it, and as its paper
describes it.

Source: CSpD (arXiv 2411.11925) and facts measured on its release. In both, a small model drafts
tokens with the same noise at every denoising step as the target will use ("aligned"), and the first
iterations are the target's own. ``release``: the target is asked once for a whole window, without
seeing the drafts in it; every position is kept. ``paper``: the target sees the drafts before each
position, by one batched pass with a row for each of them; the first iteration with a rejection ends
the window, and what was drafted after it is discarded. Neither keeps the target's distribution
(``ratios.py`` says why). Shape letters as in ``decode.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specmm.image_ar.continuous.chain import ChainHead, Condition, Steps, ancestral
from specmm.image_ar.continuous.decode import ChainStats, Plan, Progress, ask, conditions, put
from specmm.image_ar.continuous.diffusion import Schedule
from specmm.image_ar.continuous.mar import MAR, pick
from specmm.image_ar.continuous.noise import Numbers
from specmm.image_ar.continuous.orders import Iteration, iterations
from specmm.image_ar.continuous.ratios import (
    Array,
    PictureNumbers,
    Trace,
    Version,
    accept,
    resample,
)
from specmm.stats import Clock


@dataclass(frozen=True)
class Window:
    """Iterations drafted before the target is asked, and the share of all that the target makes
    first.
    """

    size: int = 8
    prefill: float = 0.05

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.prefill <= 1:
            raise ValueError(
                f"window must be at least 1 and prefill in [0, 1], got {self.size} and {self.prefill}"
            )


class Side:
    """One of the two models with its head: makes tokens of given noise and says how their chains
    ended.
    """

    def __init__(self, model: MAR, labels: Tensor | None, batch: int, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.head = ChainHead(model.head, Schedule.of(plan.head_steps))
        self.steps = Steps.ddpm(self.head.schedule)
        self.condition = conditions(model, labels, batch, plan.cfg)

    def ask(self, tokens: Tensor, known: Tensor, wanted: Tensor) -> Tensor:
        """Conditions [B · n, G, Z] of the head."""
        return ask(self.model, tokens, known, self.condition, wanted)

    def chains(self, z: Tensor, scale: float | Tensor, noise: Tensor) -> tuple[Tensor, Trace]:
        """Tokens [R, C] of ``noise`` [S + 1, R, C] under ``z``, and the ends of their chains."""
        trace: list[Tensor] = []
        tokens = ancestral(
            self.head.bind(Condition(z, scale)), self.steps, noise, self.plan.temperature, trace
        )
        before = torch.stack(trace[:-1]).sum(0) if len(trace) > 1 else torch.zeros_like(tokens)
        ends = (tokens, trace[-1].exp() * self.plan.temperature, before)
        return tokens, Trace(*(t.double().cpu().numpy() for t in ends))


class StreamNumbers:
    """Numbers for picture ``b`` of a batch from its streams."""

    def __init__(self, normal: Numbers, log_uniform: Numbers, b: int, batch: int) -> None:
        self._normal, self._log_uniform = normal, log_uniform
        self._b, self._batch = b, batch

    def normal(self, rows: int, width: int) -> Array:
        """See ``PictureNumbers``."""
        return self._draw(self._normal, rows, width)

    def uniform(self, rows: int) -> Array:
        """See ``PictureNumbers``."""
        return np.exp(self._draw(self._log_uniform, rows, 1)[:, 0])

    def _draw(self, numbers: Numbers, rows: int, width: int) -> Array:
        counts = [0] * self._batch
        counts[self._b] = rows
        return numbers.draw(counts, width).double().cpu().numpy()


@torch.inference_mode()
def decode_release(
    target: Side,
    draft: Side,
    orders: Tensor,
    noise: Tensor,
    numbers: Sequence[PictureNumbers],
    version: Version,
    window: Window,
) -> Iterator[Progress]:
    """Make pictures in their ``orders`` [B, L] from ``noise`` [B, L, S + 1, C], yielding after each
    iteration.

    A rejected token for which no proposal was taken is the target's aligned sample (the release
    writes zeros).
    """
    run = _Release(target, draft, orders, noise, numbers, version)
    plan, length = target.plan, orders.shape[1]
    parts = iterations(length, plan.num_iter, plan.cfg, plan.cfg_schedule)
    start, begun = time.perf_counter(), length
    for k, part in enumerate(parts):
        own = k <= window.prefill * plan.num_iter
        run.make(target if own else draft, part)
        begun = part.first if own else begun
        if not own and (k % window.size == 0 or k == len(parts) - 1):
            run.verify(Iteration(part.first, begun, part.scale))
            begun = part.first
        yield Progress(run.tokens, length - part.first)
    yield Progress(run.tokens, length, run.finish(time.perf_counter() - start))


class _Release:
    """Tokens [B, L, C] so far, and how the drafts' chains ended, by position [3, B, L, C]."""

    def __init__(
        self,
        target: Side,
        draft: Side,
        orders: Tensor,
        noise: Tensor,
        numbers: Sequence[PictureNumbers],
        version: Version,
    ) -> None:
        self.target, self.orders, self.noise, self.numbers, self.version = (
            target,
            orders,
            noise,
            numbers,
            version,
        )
        self.tokens = torch.zeros(*orders.shape, noise.shape[-1], device=orders.device)
        self.ends = np.zeros((3, *self.tokens.shape))
        self.clock, self.stats, self.steps = Clock(), ChainStats(), len(target.steps.keep)

    def make(self, side: Side, part: Iteration) -> None:
        """One iteration by one of the models."""
        wanted = self.orders[:, part.first : part.last].sort(-1).values
        own = side is self.target
        with self.clock("verify" if own else "draft"):
            made, trace = self._run(side, part, wanted)
        put(self.tokens, wanted, made)
        self.stats.head_calls += self.steps * wanted.numel() if own else 0
        self.stats.rounds += len(wanted) if own else 0
        rows = np.arange(len(wanted))[:, None]
        self.ends[:, rows, wanted.cpu().numpy()] = [
            t.reshape(*wanted.shape, -1) for t in (trace.mean, trace.std, trace.log_stds)
        ]

    def verify(self, part: Iteration) -> None:
        """Ask the target for a window as if nothing were drafted in it, and replace what is
        rejected.
        """
        wanted = self.orders[:, part.first : part.last].sort(-1).values
        with self.clock("verify"):
            _, trace = self._run(self.target, part, wanted)
        self.stats.head_calls += self.steps * wanted.numel()
        self.stats.rounds += len(wanted)
        for b, where in enumerate(wanted):
            rows = np.zeros(len(trace.mean), dtype=bool)
            rows[b * len(where) : (b + 1) * len(where)] = True
            drafted = self.tokens[b, where].double().cpu().numpy()
            q = Trace(*self.ends[:, b, where.cpu().numpy()])
            made, kept = settle(self.version, drafted, trace[rows], q, self.numbers[b], last=True)
            self.tokens[b, where] = torch.from_numpy(made).to(self.tokens)
            self.stats.drafted += len(where)
            self.stats.accepted += int(kept.sum())

    def _run(self, side: Side, part: Iteration, wanted: Tensor) -> tuple[Tensor, Trace]:
        z = side.ask(self.tokens, self.orders[:, part.last :], wanted)
        return side.chains(z, part.scale, noise_at(self.noise, wanted))

    def finish(self, seconds: float) -> ChainStats:
        """The run's counts."""
        return timed(self.stats, self.clock, seconds, self.orders.numel())


def settle(
    version: Version, drafted: Array, p: Trace, q: Trace, numbers: PictureNumbers, last: bool
) -> tuple[Array, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Tokens [N, C] that are kept or drawn in the place of ``drafted`` ones, and which were kept.

    Where p has nothing that q lacks no proposal is ever taken: such a token is the target's aligned
    sample.
    """
    kept = accept(version, drafted, p, q, numbers)
    if kept.all():
        return drafted, kept
    made, found = resample(version, p, q, numbers, last)
    made[~found] = p.mean[~found]
    return np.where(kept[:, None], drafted, made), kept


def noise_at(noise: Tensor, wanted: Tensor) -> Tensor:
    """Noise [S + 1, B · n, C] of positions ``wanted`` [B, n] out of ``noise`` [B, L, S + 1, C]."""
    return pick(noise.flatten(2), wanted).view(wanted.numel(), noise.shape[2], -1).transpose(0, 1)


def timed(stats: ChainStats, clock: Clock, seconds: float, tokens: int) -> ChainStats:
    """``stats`` with the times filled in."""
    stats.tokens, stats.seconds, stats.batch_rounds = tokens, seconds, stats.rounds
    stats.draft_seconds, stats.verify_seconds = clock.seconds["draft"], clock.seconds["verify"]
    return stats
