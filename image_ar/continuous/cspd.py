"""CSpD between two MAR models: acceptance of whole drafted tokens, and the loops of the paper and
of the release.

Source: CSpD (arXiv 2411.11925, section 3 and algorithm 1) and facts measured on its release. In
both, a small model drafts tokens with the same noise at every denoising step as the target will use
("aligned"), and the first iterations are the target's own. The release computes the target once for
a whole window, without showing it the window's drafts, and discards no position. In the paper's
loop the target's pass over a window has one row for each drafted iteration, with the tokens drafted
before it among its known ones, and a rejection ends the window; pictures accept different lengths,
and their rounds are run together.

A token's chain ends in a step whose Gaussian has a mean (the token itself, since no noise is added
there) and a width that is never used; all rules take that Gaussian for the density of the token,
which is why none keeps the target's distribution. Rules compute in numpy's float64: ratios reach
e^-200. Shape letters as in ``masked_decode``; R rows of a pass, N tokens of a comparison or of all
rows, S head steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specmm.core.stats import Clock
from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead, HeadCondition, ancestral, finite
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
Row = tuple[int, Iteration]  # of a pass: a picture, and an iteration of it to make
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
        found: Array = -(0.5 * ((x - self.mean) / std) ** 2 + np.log(std)).sum(-1)
        return found


@dataclass
class PaperRule:
    """r = Π √|Σq|/√|Σp| · p(x)/q(x): the spreads of the steps before, then the last Gaussians,
    whose widths are times ``relax`` in r.
    """

    relax: float = 1.0
    sign: ClassVar[int] = 1  # of the factor of the spreads, in the log

    def __post_init__(self) -> None:
        if not self.relax > 0:
            raise ValueError(
                f"relax must be above 0 (it widens a standard deviation), got {self.relax}"
            )

    def log_ratio(self, x: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """log r [N] of drafted tokens ``x`` [N, C]: kept with probability min(1, r)."""
        return self._spreads(p, q) + p.log_density(x, self.relax) - q.log_density(x, self.relax)

    def log_residual(self, y: Array, p: ChainEnd, q: ChainEnd) -> Array:
        """log q/(F p) [N] of proposals ``y`` ~ p: accepted with probability 1 - q/(F p); not
        relaxed. p bounds (F p - q)+ / F, so no probability is ever above 1.
        """
        return q.log_density(y) - p.log_density(y) - self._spreads(p, q)

    def _spreads(self, p: ChainEnd, q: ChainEnd) -> Array:
        spreads: Array = (q.log_stds - p.log_stds).sum(-1)
        return self.sign * spreads


@dataclass
class ReleaseRule(PaperRule):
    """The paper's with the factor of the spreads upside down, and relaxed."""

    relax: float = RELAX
    sign: ClassVar[int] = -1


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


def accept(rule: PaperRule, x: Array, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers) -> Mask:
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
    rule: PaperRule, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers, last: bool
) -> tuple[Array, Mask]:
    """Tokens [N, C] from the residual of p over q, and which rows [N] had an accepted proposal.

    Proposals are drawn until every row has accepted one; ``last`` takes a row's last accepted one
    (as the release), not its first. Rows without any are zero; the caller handles them.
    """
    made = np.zeros_like(p.mean)
    found = np.zeros(len(p.mean), dtype=bool)
    for _ in range(PROPOSALS):
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
    rule: PaperRule, drafted: Array, p: ChainEnd, q: ChainEnd, numbers: StreamNumbers, last: bool
) -> tuple[Array, Mask]:
    """Tokens [N, C]: the ``drafted`` ones or replacements, and which were accepted [N].

    If p nowhere exceeds q, no proposal is ever accepted: such a token is the target's aligned
    sample (the release writes zeros).
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
    """Two models and what they draw: ``orders`` [B, L], ``noise`` [B, L, S + 1, C] of every
    position, which both models' chains use, and the numbers of each picture's acceptance.
    """

    target: CSpDModel
    draft: CSpDModel
    orders: Tensor
    noise: Tensor
    numbers: Sequence[StreamNumbers]


class Made(NamedTuple):
    """``tokens`` [n, C] of an iteration of picture ``b`` at positions ``where`` [n], and how their
    chains ended.
    """

    b: int
    where: Tensor
    tokens: Tensor
    ends: ChainEnd


class CSpDRun:
    """Tokens [B, L, C] so far, by position how the chains of drafts ended [3, B, L, C], and the
    counts of the run.
    """

    def __init__(self, batch: CSpDBatch) -> None:
        self.batch = batch
        self.orders = batch.orders
        self.tokens = torch.zeros(
            *batch.orders.shape, batch.noise.shape[-1], device=batch.orders.device
        )
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

    def verify(self, rule: PaperRule | None, own: Made, last: bool) -> Mask:
        """Compare drafts with the target's ``own`` tokens, and replace those that are rejected;
        returns which were kept.
        """
        made = own.ends.mean
        kept = np.zeros(len(own.where), dtype=bool)
        if rule is not None:
            drafted = self.tokens[own.b, own.where].double().cpu().numpy()
            q = ChainEnd(*self.ends[:, own.b, own.where.cpu().numpy()])
            made, kept = verify_tokens(rule, drafted, own.ends, q, self.batch.numbers[own.b], last)
        self.tokens[own.b, own.where] = torch.from_numpy(made).to(self.tokens)
        self.stats.drafted += len(kept)
        self.stats.accepted += int(kept.sum())
        return kept

    def round(self, parts: Mapping[int, Sequence[Iteration]]) -> dict[int, int]:
        """Draft ``parts`` of each picture, verify them from left to right as the paper does; how
        many of each are made.
        """
        for column in zip_longest(*parts.values()):
            now = zip(parts, column, strict=True)
            self.make(self.batch.draft, [(b, part) for b, part in now if part is not None])
        made = dict.fromkeys(parts, 0)
        rejected: set[int] = set()
        for own in self.compute(self.batch.target, [(b, x) for b, of in parts.items() for x in of]):
            if own.b not in rejected:
                made[own.b] += 1
                if not self.verify(PaperRule(), own, last=False).all():
                    rejected.add(own.b)
        return made

    def make(self, model: CSpDModel, rows: Sequence[Row]) -> None:
        """Compute ``rows`` by ``model``, and write their tokens."""
        for made in self.compute(model, rows):
            self.tokens[made.b, made.where] = made.tokens
            self.ends[:, made.b, made.where.cpu().numpy()] = made.ends

    def compute(self, model: CSpDModel, rows: Sequence[Row]) -> list[Made]:
        """One pass of ``model``: each of ``rows`` given the tokens before it."""
        own = model is self.batch.target
        with self.clock("verify" if own else "draft"):
            found = self._pass(model, rows)
        if own:
            self.stats.rounds += len({b for b, _ in rows})
            self.stats.head_calls += len(model.steps.keep) * sum(len(x.where) for x in found)
        return found

    def _pass(self, model: CSpDModel, parts: Sequence[Row]) -> list[Made]:
        device = self.orders.device
        rows = torch.tensor([b for b, _ in parts], device=device)
        where = [self.orders[b, part.first : part.last].sort().values for b, part in parts]
        counts = torch.tensor([len(w) for w in where], device=device)
        first = min(part.last for _, part in parts)
        known = self.orders[rows, first:]
        valid = None
        if any(part.last > first for _, part in parts):
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
        found = []
        first = 0
        for (b, _), place in zip(parts, where, strict=True):
            own = slice(first, first + len(place))
            found.append(Made(b, place, tokens[own], ChainEnd(*(x[own] for x in ends))))
            first = own.stop
        return found


@torch.inference_mode()
def decode_release(
    batch: CSpDBatch, rule: PaperRule | None, window: DraftWindow
) -> Iterator[MARProgress]:
    """Make the pictures of ``batch`` as CSpD's release does, yielding after each iteration.

    Without a ``rule`` no draft is kept: each is replaced by the target's sample of its noise. That
    is the baseline which acceptance must beat: as many passes of the target.
    """
    run = CSpDRun(batch)
    pictures = range(len(batch.orders))
    length = begun = batch.orders.shape[1]
    settings = batch.target.settings
    parts = settings.iterations(length)
    for k, part in enumerate(parts):
        own = k <= window.prefill * settings.num_iter
        run.make(batch.target if own else batch.draft, [(b, part) for b in pictures])
        if own:
            begun = part.first
        elif k % window.size == 0 or k == len(parts) - 1:
            # by the target's own chains, as if nothing were drafted in the window
            whole = Iteration(part.first, begun, part.scale)
            for made in run.compute(batch.target, [(b, whole) for b in pictures]):
                run.verify(rule, made, last=True)
            begun = part.first
        yield MARProgress(run.tokens, length - part.first)
    yield run.finish()


@torch.inference_mode()
def decode_paper(batch: CSpDBatch, window: DraftWindow) -> Iterator[MARProgress]:
    """Make the pictures of ``batch`` as the paper does, yielding after each pass of the target."""
    run = CSpDRun(batch)
    length = batch.orders.shape[1]
    parts = batch.target.settings.iterations(length)
    own = math.ceil(window.prefill * len(parts))
    for part in parts[:own]:
        run.make(batch.target, [(b, part) for b in range(len(batch.orders))])
        yield MARProgress(run.tokens, length - part.first)
    done = [own] * len(batch.orders)
    while min(done) < len(parts):
        wanted = {b: parts[n : n + window.size] for b, n in enumerate(done) if n < len(parts)}
        for b, made in run.round(wanted).items():
            done[b] += made
        yield MARProgress(run.tokens, length - parts[min(done) - 1].first)
    yield run.finish()
