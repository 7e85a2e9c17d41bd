"""CSpD between two MAR models as its release does it: acceptance of whole drafted tokens.

Source: CSpD (arXiv 2411.11925, section 3) and facts measured on its release. A small model drafts
tokens with the same noise at every denoising step as the target will use ("aligned"), and the first
iterations are the target's own. The target runs once for a whole window, without reading the
window's drafts, and no position is discarded.

A token's chain ends in a step whose Gaussian has a mean (the token itself, since no noise is added
there) and a width that is never used; the rule takes that Gaussian for the density of the token,
which is why it does not keep the target's distribution. It computes in numpy's float64: ratios
reach e^-200. Shape letters as in ``masked_decode``; N tokens of a comparison, S head steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specmm.core.stats import Clock
from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import (
    ChainHead,
    HeadCondition,
    ancestral,
    check_plain,
    finite,
)
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.masked_decode import (
    ChainStats,
    MARProgress,
    class_conditions,
    head_conditions,
)
from specmm.image_ar.continuous.orders import Iteration, MARSettings, Stream

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
RELAX = 42.0  # the release's factor on standard deviations
PROPOSALS = 100  # the release's, for a rejected token


class ChainEnd(NamedTuple):
    """Ends of chains: ``mean`` and ``std`` [N, C] of the last step, and the sum of the log σ [N, C]
    of the steps before it.
    """

    mean: Array
    std: Array
    log_stds: Array

    def log_density(self, x: Array, widen: float = 1.0) -> Array:
        """Log density [N] of ``x`` under the last step's Gaussian, up to a constant."""
        std = widen * self.std
        density: Array = -(0.5 * ((x - self.mean) / std) ** 2 + np.log(std)).sum(-1)
        return density


@dataclass
class ReleaseRule:
    """r = Π √|Σp|/√|Σq| · p(x)/q(x): the spreads of the steps before, then the last Gaussians,
    whose widths are times ``relax`` in r. The paper has the factor of the spreads upside down.
    """

    relax: float = RELAX

    def __post_init__(self) -> None:
        if not self.relax > 0:
            raise ValueError(
                f"relax must be above 0 (it widens a standard deviation), got {self.relax}"
            )

    def log_ratio(self, x: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """log r [N] of drafted tokens ``x`` [N, C]: kept with probability min(1, r)."""
        return _spreads(p, q) + p.log_density(x, self.relax) - q.log_density(x, self.relax)

    def log_residual(self, y: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """log q/(F p) [N] of proposals ``y`` ~ p: accepted with probability 1 - q/(F p); not
        relaxed. p bounds (F p - q)+ / F, so no probability is ever above 1.
        """
        return q.log_density(y) - p.log_density(y) - _spreads(p, q)


def _spreads(p: ChainEnd, q: ChainEnd) -> Array:
    spreads: Array = (p.log_stds - q.log_stds).sum(-1)
    return spreads


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


def accept(rule: ReleaseRule, x: Array, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers) -> Mask:
    """Which drafted tokens ``x`` [N, C] to accept [N]; ``ValueError`` for degenerate widths."""
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
    rule: ReleaseRule, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers
) -> tuple[Array, Mask]:
    """Tokens [N, C] from the residual of p over q, and which rows [N] had an accepted proposal.

    Proposals are drawn until every row has accepted one, and a row's last accepted one is taken.
    Rows without any are zero; the caller handles them.
    """
    tokens = np.zeros_like(p.mean)
    accepted = np.zeros(len(p.mean), dtype=bool)
    for _ in range(PROPOSALS):
        y = p.mean + p.std * numbers.normal(*p.mean.shape)
        with np.errstate(over="ignore"):
            accepted_now = numbers.uniform(len(y)) < 1 - np.exp(rule.log_residual(y, p, q))
        tokens[accepted_now] = y[accepted_now]
        accepted |= accepted_now
        if accepted.all():
            break
    return tokens, accepted


def verify_tokens(
    rule: ReleaseRule, drafted: Array, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers
) -> tuple[Array, Mask]:
    """Tokens [N, C]: the ``drafted`` ones or replacements, and which were accepted [N].

    If p nowhere exceeds q, no proposal is ever accepted: such a token is the target's aligned
    sample (the release writes zeros).
    """
    kept = accept(rule, drafted, p, q, numbers)
    if kept.all():
        return drafted, kept
    tokens, accepted = resample(rule, p, q, numbers)
    tokens[~accepted] = p.mean[~accepted]
    return np.where(kept[:, None], drafted, tokens), kept


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
    """One of the two models with its head: turns noise into tokens and the ends of their chains."""

    def __init__(
        self, model: MAR, labels: Tensor | None, batch: int, settings: MARSettings
    ) -> None:
        self.model = model
        self.settings = settings
        check_plain(model.head)
        self.head = ChainHead(model.head, NoiseSchedule.of(settings.head_steps))
        self.steps = ChainSteps.ddpm(self.head.schedule)
        self.classes = class_conditions(model, labels, batch, settings.cfg)

    def chains(self, z: Tensor, scale: float | Tensor, noise: Tensor) -> tuple[Tensor, ChainEnd]:
        """Tokens [R, C] of ``noise`` [S + 1, R, C] under ``z``, and the ends of their chains."""
        trace: list[Tensor] = []  # gets each step's logarithm of the deviation [R, C]
        bound = self.head.bind(HeadCondition(z, scale))
        tokens = finite(ancestral(bound, self.steps, noise, self.settings.temperature, trace))
        before = torch.stack(trace[:-1]).sum(0) if len(trace) > 1 else torch.zeros_like(tokens)
        ends = (tokens, trace[-1].exp() * self.settings.temperature, before)
        return tokens, ChainEnd(*(t.double().cpu().numpy() for t in ends))


@dataclass
class CSpDBatch:
    """Two models and the inputs of their pictures: ``orders`` [B, L], ``noise`` [B, L, S + 1, C] of
    every position, which the chains of both models use, and the random numbers of each picture's
    acceptance.
    """

    target: CSpDModel
    draft: CSpDModel
    orders: Tensor
    noise: Tensor
    numbers: Sequence[StreamNumbers]


class Made(NamedTuple):
    """``tokens`` [B, n, C] at positions ``where`` [B, n], and their chains' ``ends`` [B · n]."""

    where: Tensor
    tokens: Tensor
    ends: ChainEnd


class CSpDRun:
    """The tokens so far [B, L, C], the ends of the drafts' chains by position [3, B, L, C], and the
    counts of the run.
    """

    def __init__(self, batch: CSpDBatch) -> None:
        self.batch = batch
        self.orders = batch.orders
        self.pictures = torch.arange(len(batch.orders), device=batch.orders.device)[:, None]
        shape = *batch.orders.shape, batch.noise.shape[-1]
        self.tokens = torch.zeros(shape, dtype=torch.float32, device=batch.orders.device)
        self.ends = np.zeros((3, *self.tokens.shape))
        self.clock = Clock()
        self.stats = ChainStats()
        self._begin = time.perf_counter()

    def finish(self) -> MARProgress:
        """The last state, with the run's counts."""
        stats = self.stats
        stats.tokens = self.orders.numel()
        stats.seconds = time.perf_counter() - self._begin
        stats.batch_rounds = stats.rounds
        stats.draft_seconds = self.clock.seconds["draft"]
        stats.verify_seconds = self.clock.seconds["verify"]
        return MARProgress(self.tokens, self.orders.shape[1], stats)

    def make(self, model: CSpDModel, iteration: Iteration) -> None:
        """Draw ``iteration`` of every picture with ``model``, and store its tokens."""
        where, tokens, ends = self.compute(model, iteration)
        self.tokens[self.pictures, where] = tokens
        self.ends[:, self.pictures.cpu().numpy(), where.cpu().numpy()] = np.stack(ends).reshape(
            3, *tokens.shape
        )

    def verify(self, rule: ReleaseRule, iteration: Iteration) -> None:
        """Compare the drafts of ``iteration`` with tokens that the target draws without reading
        them, and replace rejected drafts.
        """
        where, _, ends = self.compute(self.batch.target, iteration)
        for b, (places, numbers) in enumerate(zip(where, self.batch.numbers, strict=True)):
            window_rows = slice(b * len(places), (b + 1) * len(places))
            drafted = self.tokens[b, places].double().cpu().numpy()
            p = ChainEnd(*(x[window_rows] for x in ends))
            q = ChainEnd(*self.ends[:, b, places.cpu().numpy()])
            tokens, kept = verify_tokens(rule, drafted, p, q, numbers)
            self.tokens[b, places] = torch.from_numpy(tokens).to(self.tokens)
            self.stats.drafted += len(kept)
            self.stats.accepted += int(kept.sum())

    def compute(self, model: CSpDModel, iteration: Iteration) -> Made:
        """One pass of ``model``: ``iteration`` of every picture given the tokens before it."""
        is_target = model is self.batch.target
        with self.clock("verify" if is_target else "draft"):
            where = self.orders[:, iteration.first : iteration.last].sort().values
            known = self.orders[:, iteration.last :]
            z = head_conditions(model.model, self.tokens, known, model.classes, where)
            noise = self.batch.noise[self.pictures, where].flatten(0, 1).transpose(0, 1)
            tokens, ends = model.chains(z, iteration.scale, noise)
        if is_target:
            self.stats.rounds += len(where)
            self.stats.head_calls += len(model.steps.keep) * where.numel()
        return Made(where, tokens.view(*where.shape, -1), ends)


@torch.inference_mode()
def decode_release(
    batch: CSpDBatch, rule: ReleaseRule, window: DraftWindow
) -> Iterator[MARProgress]:
    """Draw the pictures of ``batch`` as CSpD's release does, yielding after each iteration.
    Unverified drafts do not count as tokens.
    """
    run = CSpDRun(batch)
    length = begun = batch.orders.shape[1]
    settings = batch.target.settings
    iterations = settings.iterations(length)
    for k, iteration in enumerate(iterations):
        prefilling = k <= window.prefill * settings.num_iter
        run.make(batch.target if prefilling else batch.draft, iteration)
        if prefilling:
            begun = iteration.first
        elif k % window.size == 0 or k == len(iterations) - 1:
            run.verify(rule, Iteration(iteration.first, begun, iteration.scale))
            begun = iteration.first
        drafted = run.orders[:, iteration.first : begun, None].expand(-1, -1, run.tokens.shape[-1])
        yield MARProgress(run.tokens.scatter(1, drafted, 0.0), length - begun)
    yield run.finish()
