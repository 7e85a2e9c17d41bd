"""CSpD between two MAR models: how whole drafted tokens are accepted, and the loop of its release.

Source: CSpD (arXiv 2411.11925, section 3 and algorithm 1) and facts measured on its release. In
both, a small model drafts tokens with the same noise at every denoising step as the target will use
("aligned"), and the first iterations are the target's own. The release computes the target once for
a whole window, without showing it the drafts in it, and keeps every position; ``cspd_paper`` is the
loop of the paper. A token's chain ends in a step whose Gaussian has a mean (the token itself, since
no noise is added there) and a width that is never used; all rules take that Gaussian for the
density of the token, which is why none keeps the target's distribution. Rules compute in numpy's
float64: ratios reach e^-200. Shape letters as in ``masked_decode``; N tokens of a comparison, S
head steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import (
    BoundHead,
    ChainHead,
    HeadCondition,
    ancestral,
    finite,
)
from specmm.image_ar.continuous.mar import MAR, pick
from specmm.image_ar.continuous.masked_decode import (
    ChainStats,
    MARProgress,
    View,
    class_conditions,
    head_conditions,
    write_tokens,
)
from specmm.image_ar.continuous.orders import Iteration, MARSettings, Stream
from specmm.stats import Clock

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
RELAX = 42.0  # the release's factor on standard deviations
PROPOSALS = 100  # the release's, for a rejected token


@dataclass
class ChainEnd:
    """How chains ended: ``mean`` and ``std`` [N, C] of the last step, and the sum of the log σ
    [N, C] of the steps before.
    """

    mean: Array
    std: Array
    log_stds: Array

    def __getitem__(self, rows: Mask) -> ChainEnd:
        return ChainEnd(self.mean[rows], self.std[rows], self.log_stds[rows])

    def log_density(self, x: Array, widen: float = 1.0) -> Array:
        """Log density [N] of ``x`` under the last step's Gaussian, up to a constant."""
        std = widen * self.std
        found: Array = -(0.5 * ((x - self.mean) / std) ** 2 + np.log(std)).sum(-1)
        return found


class CSpDRule(Protocol):
    """Compares drafted tokens with the target's; rejected ones get up to ``proposals``."""

    proposals: int

    def log_ratio(self, x: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """log r [N] of drafted tokens ``x`` [N, C]: kept with probability min(1, r)."""

    def log_residual(self, y: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """log q/(F p) [N] of proposals ``y`` ~ p: accepted with probability 1 - q/(F p)."""


class PaperRule:
    """r = Π √|Σq|/√|Σp| · p(x)/q(x): the spreads of the steps before, then the last Gaussians."""

    proposals = PROPOSALS

    def log_ratio(self, x: Array, p: ChainEnd, q: ChainEnd) -> Array:
        return -self.log_residual(x, p, q)

    def log_residual(self, y: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """See ``CSpDRule``; p bounds (F p - q)+ / F, so no probability is ever above 1."""
        spreads: Array = (q.log_stds - p.log_stds).sum(-1)
        return q.log_density(y) - p.log_density(y) - spreads


@dataclass
class ReleaseRule:
    """The paper's with the factor of the spreads upside down, and widths times ``relax`` in r."""

    relax: float = RELAX
    proposals: int = PROPOSALS

    def __post_init__(self) -> None:
        if not self.relax > 0:
            raise ValueError(
                f"relax must be above 0 (it widens a standard deviation), got {self.relax}"
            )

    def log_ratio(self, x: Array, p: ChainEnd, q: ChainEnd) -> Array:
        return self._spreads(p, q) + p.log_density(x, self.relax) - q.log_density(x, self.relax)

    def log_residual(self, y: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """See ``CSpDRule``; not relaxed."""
        return q.log_density(y) - p.log_density(y) - self._spreads(p, q)

    def _spreads(self, p: ChainEnd, q: ChainEnd) -> Array:
        factor: Array = (p.log_stds - q.log_stds).sum(-1)
        return factor


@dataclass
class StreamNumbers:
    """Numbers for picture ``b`` of ``batch`` pictures from its streams."""

    normals: Stream
    log_uniforms: Stream
    b: int
    batch: int

    def normal(self, rows: int, width: int) -> Array:
        """Standard normal numbers [rows, width]."""
        return self._draw(self.normals, rows, width)

    def uniform(self, rows: int) -> Array:
        """Uniform numbers [rows] in [0, 1)."""
        return np.exp(self._draw(self.log_uniforms, rows, 1)[:, 0])

    def _draw(self, stream: Stream, rows: int, width: int) -> Array:
        counts = [0] * self.batch
        counts[self.b] = rows
        return stream.draw(counts, width).double().cpu().numpy()


def accept(rule: CSpDRule, x: Array, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers) -> Mask:
    """Which drafted tokens ``x`` [N, C] are kept [N]; ``ValueError`` for widths of no density."""
    for ends in (p, q):
        if not (np.isfinite(ends.std).all() and (ends.std > 0).all()):
            raise ValueError(
                "standard deviations to compare must be above 0 and finite, "
                "got others: is temperature 0?"
            )
    with np.errstate(over="ignore", divide="ignore"):
        kept: Mask = np.exp(rule.log_ratio(x, p, q)) > numbers.uniform(len(x))
    return kept


def resample(
    rule: CSpDRule, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers, last: bool
) -> tuple[Array, Mask]:
    """Tokens [N, C] of what p has more of than q, and which were found in the rule's proposals [N].

    Proposals go on until every row has one; ``last`` takes the last of a row's own (the release),
    not the first. Rows without any are zero: what to do with them is the caller's decision.
    """
    made = np.zeros_like(p.mean)
    found = np.zeros(len(p.mean), dtype=bool)
    for _ in range(rule.proposals):
        y = p.mean + p.std * numbers.normal(*p.mean.shape)
        with np.errstate(over="ignore"):
            taken = numbers.uniform(len(y)) < 1 - np.exp(rule.log_residual(y, p, q))
        fresh = taken if last else taken & ~found
        made[fresh] = y[fresh]
        found |= taken
        if found.all():
            break
    return made, found


def verify_tokens(
    rule: CSpDRule, drafted: Array, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers, last: bool
) -> tuple[Array, Mask]:
    """Tokens [N, C], kept or drawn in the place of ``drafted`` ones, and which were kept.

    Where p has nothing that q lacks no proposal is ever accepted: such a token is the target's
    aligned sample (the release writes zeros).
    """
    kept = accept(rule, drafted, p, q, numbers)
    if kept.all():
        return drafted, kept
    made, found = resample(rule, p, q, numbers, last)
    made[~found] = p.mean[~found]
    return np.where(kept[:, None], drafted, made), kept


@dataclass(frozen=True)
class DraftWindow:
    """Iterations drafted before the target's pass, and the share of all it makes first."""

    size: int = 8
    prefill: float = 0.05

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.prefill <= 1:
            raise ValueError(
                "window must be at least 1 and prefill in [0, 1], "
                f"got {self.size} and {self.prefill}"
            )


class CSpDModel:
    """One of the two models with its head: makes tokens of given noise, with their chains' ends."""

    def __init__(
        self, model: MAR, labels: Tensor | None, batch: int, settings: MARSettings
    ) -> None:
        self.model = model
        self.settings = settings
        self.head = ChainHead(model.head, NoiseSchedule.of(settings.head_steps))
        self.steps = ChainSteps.ddpm(self.head.schedule)
        self.classes = class_conditions(model, labels, batch, settings.cfg)

    def conditions(self, view: View) -> Tensor:
        """Conditions [B · n, G, Z] of the head."""
        return head_conditions(self.model, view.tokens, view.known, self.classes, view.wanted)

    def bind(self, view: View, scale: float | Tensor) -> BoundHead:
        """The head for the tokens of ``view``."""
        return self.head.bind(HeadCondition(self.conditions(view), scale))

    def chains(self, z: Tensor, scale: float | Tensor, noise: Tensor) -> tuple[Tensor, ChainEnd]:
        """Tokens [R, C] of ``noise`` [S + 1, R, C] under ``z``, and the ends of their chains."""
        trace: list[Tensor] = []
        bound = self.head.bind(HeadCondition(z, scale))
        tokens = finite(ancestral(bound, self.steps, noise, self.settings.temperature, trace))
        before = torch.stack(trace[:-1]).sum(0) if len(trace) > 1 else torch.zeros_like(tokens)
        ends = (tokens, trace[-1].exp() * self.settings.temperature, before)
        return tokens, ChainEnd(*(t.double().cpu().numpy() for t in ends))


@dataclass
class CSpDBatch:
    """Two models and what they draw: ``orders`` [B, L], ``noise`` [B, L, S + 1, C] of every
    position, which both models' chains use, and the numbers of each picture's acceptance.
    """

    target: CSpDModel
    draft: CSpDModel
    orders: Tensor
    noise: Tensor
    numbers: Sequence[StreamNumbers]


class CSpDRun:
    """Tokens [B, L, C] so far, and the counts of the run."""

    def __init__(self, batch: CSpDBatch) -> None:
        self.batch = batch
        self.orders = batch.orders
        self.tokens = torch.zeros(
            *batch.orders.shape, batch.noise.shape[-1], device=batch.orders.device
        )
        self.steps = len(batch.target.steps.keep)
        self.clock = Clock()
        self.stats = ChainStats()
        self._begin = time.perf_counter()

    def count(self, rows: int, tokens: int) -> None:
        """Count a pass of the target over ``rows`` that ran the chains of ``tokens``."""
        self.stats.rounds += rows
        self.stats.head_calls += self.steps * tokens

    def finish(self) -> MARProgress:
        """The last state, with the run's counts."""
        stats = self.stats
        stats.tokens = self.orders.numel()
        stats.seconds = time.perf_counter() - self._begin
        stats.batch_rounds = stats.rounds
        stats.draft_seconds = self.clock.seconds["draft"]
        stats.verify_seconds = self.clock.seconds["verify"]
        return MARProgress(self.tokens, self.orders.shape[1], stats)

    def verify(
        self, rule: CSpDRule | None, b: int, where: Tensor, p: ChainEnd, q: ChainEnd, last: bool
    ) -> Mask:
        """Replace the rejected tokens of picture ``b`` at ``where``; returns which were kept."""
        made = p.mean
        kept = np.zeros(len(where), dtype=bool)
        if rule is not None:
            drafted = self.tokens[b, where].double().cpu().numpy()
            made, kept = verify_tokens(rule, drafted, p, q, self.batch.numbers[b], last)
        self.tokens[b, where] = torch.from_numpy(made).to(self.tokens)
        self.stats.drafted += len(kept)
        self.stats.accepted += int(kept.sum())
        return kept


@torch.inference_mode()
def decode_release(
    batch: CSpDBatch, rule: CSpDRule | None, window: DraftWindow
) -> Iterator[MARProgress]:
    """Make the pictures of ``batch`` as CSpD's release does, yielding after each iteration.

    Without a ``rule`` no draft is kept: each is replaced by the target's sample of its noise. That
    is the baseline which acceptance must beat: as many passes of the target.
    """
    run = _ReleaseRun(batch)
    length = batch.orders.shape[1]
    settings = batch.target.settings
    parts = settings.iterations(length)
    begun = length
    for k, part in enumerate(parts):
        own = k <= window.prefill * settings.num_iter
        run.make(batch.target if own else batch.draft, part)
        if own:
            begun = part.first
        elif k % window.size == 0 or k == len(parts) - 1:
            run.verify_window(rule, Iteration(part.first, begun, part.scale))
            begun = part.first
        yield MARProgress(run.tokens, length - part.first)
    yield run.finish()


class _ReleaseRun(CSpDRun):
    """How the drafts' chains ended is kept by position, [3, B, L, C]."""

    def __init__(self, batch: CSpDBatch) -> None:
        super().__init__(batch)
        self.ends = np.zeros((3, *self.tokens.shape))

    def make(self, model: CSpDModel, part: Iteration) -> None:
        """One iteration by one of the models."""
        wanted, made, ends = self._chains(model, part)
        write_tokens(self.tokens, wanted, made)
        rows = np.arange(len(wanted))[:, None]
        by_picture = [t.reshape(*wanted.shape, -1) for t in (ends.mean, ends.std, ends.log_stds)]
        self.ends[:, rows, wanted.cpu().numpy()] = by_picture

    def verify_window(self, rule: CSpDRule | None, part: Iteration) -> None:
        """Verify a window by the target's own chains, as if nothing were drafted in it."""
        wanted, _, ends = self._chains(self.batch.target, part)
        for b, where in enumerate(wanted):
            rows = np.zeros(len(ends.mean), dtype=bool)
            rows[b * len(where) : (b + 1) * len(where)] = True
            q = ChainEnd(*self.ends[:, b, where.cpu().numpy()])
            self.verify(rule, b, where, ends[rows], q, last=True)

    def _chains(self, model: CSpDModel, part: Iteration) -> tuple[Tensor, Tensor, ChainEnd]:
        """Positions [B, n] of ``part``, their tokens [B · n, C] by ``model``, and the ends."""
        own = model is self.batch.target
        wanted = self.orders[:, part.first : part.last].sort(-1).values
        with self.clock("verify" if own else "draft"):
            z = model.conditions(View(self.tokens, self.orders[:, part.last :], wanted))
            noise = pick(self.batch.noise.flatten(2), wanted)  # [B, n, (S + 1) · C]
            noise = noise.view(wanted.numel(), self.batch.noise.shape[2], -1).transpose(0, 1)
            made, ends = model.chains(z, part.scale, noise)
        if own:
            self.count(len(wanted), wanted.numel())
        return wanted, made, ends
