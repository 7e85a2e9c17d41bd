"""MAR's loop over a picture's iterations: the transformer conditions the head, a sampler runs it.

Shape letters: B pictures, L tokens a picture, n tokens of an iteration, R = B·n, G branches (2 with
guidance), C token width, Z width of the head's condition. A round is one pass of the target's
transformer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from specmm.choose.threads import look_again
from specmm.core.stats import Clock, Stats
from specmm.core.watching import tell
from specmm.image_ar.continuous.diffusion import ChainSteps
from specmm.image_ar.continuous.diffusion_head import (
    BoundHead,
    ChainHead,
    HeadCondition,
    ancestral,
    deterministic,
    finite,
)
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.orders import MARSettings, Stream
from specmm.loading.hardware import attention_of_any_length


@dataclass
class ChainStats(Stats):
    """Statistics of a run that draws continuous tokens; ``rounds`` are passes of the target's
    transformer.

    ``head_calls``: the sequential calls of the target's head before a token was ready, summed over
    tokens. ``drafted`` and ``accepted`` count tokens in methods that draft whole tokens.
    """

    head_calls: int = 0
    head_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def head_calls_per_token(self) -> float:
        """Sequential head calls per token."""
        return self.head_calls / max(self.tokens, 1)

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted; 0 when none were drafted."""
        return self.accepted / max(self.drafted, 1)

    def as_dict(self) -> dict[str, object]:
        """Statistics for reports, as JSON."""
        more = {"head_calls_per_token": self.head_calls_per_token, "acceptance": self.acceptance}
        return super().as_dict() | more

    def add(self, other: Stats) -> None:
        """Add another run's counts."""
        super().add(other)
        for name in ("head_calls", "head_seconds", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name, 0))


class MARSampler(Protocol):
    """Draws the tokens of one iteration by the ``head``."""

    head: ChainHead

    def sample(self, condition: HeadCondition, rows: list[int]) -> tuple[Tensor, int]:
        """``rows[b]`` tokens of each picture b [R, C] under ``condition``, and the sum over tokens
        of the head calls before each was ready.
        """


class PlainSampler(ABC):
    """Runs whole chains, one head call a step; ``temperature`` scales the noise that steps add.

    ``run``, if set, is a faster equivalent of ``chains``.
    """

    temperature = 0.0

    def __init__(self, head: ChainHead, normal: Stream) -> None:
        self.head = head
        self.normal = normal
        self.run: Callable[[BoundHead, Tensor], Tensor] | None = None

    def sample(self, condition: HeadCondition, rows: list[int]) -> tuple[Tensor, int]:
        """See ``MARSampler``; raises ``ValueError`` when a chain leaves the finite numbers."""
        run = self.run or self.chains
        tokens = finite(run(self.head.bind(condition), self.noise(rows)))
        return tokens, len(self.head.times) * len(tokens)

    @abstractmethod
    def noise(self, rows: list[int]) -> Tensor:
        """The numbers of the chains of ``rows[b]`` tokens of picture b."""

    @abstractmethod
    def chains(self, bound: BoundHead, noise: Tensor) -> Tensor:
        """Tokens [R, C] of ``noise``."""


class Ancestral(PlainSampler):
    """DDPM as published."""

    def __init__(self, head: ChainHead, normal: Stream, temperature: float = 1.0) -> None:
        super().__init__(head, normal)
        self.temperature = temperature
        self.steps = ChainSteps.ddpm(head.schedule)

    def noise(self, rows: list[int]) -> Tensor:
        """[S + 1, R, C]: the start, then one for each step."""
        count = len(self.head.times) + 1
        drawn = self.normal.draw(rows, count * self.head.channels)
        return drawn.view(-1, count, self.head.channels).transpose(0, 1)

    def chains(self, bound: BoundHead, noise: Tensor) -> Tensor:
        return ancestral(bound, self.steps, noise, self.temperature)


class Deterministic(PlainSampler):
    """DDIM: noise at the start only, so fewer steps are enough; not the distribution of DDPM."""

    def __init__(self, head: ChainHead, normal: Stream) -> None:
        super().__init__(head, normal)
        self.steps = ChainSteps.ddim(head.schedule)

    def noise(self, rows: list[int]) -> Tensor:
        """The start [R, C]."""
        return self.normal.draw(rows, self.head.channels)

    def chains(self, bound: BoundHead, noise: Tensor) -> Tensor:
        return deterministic(bound, self.steps, noise)


class HeadCalls(NamedTuple):
    """Event for watchers after an iteration: the ``places`` [B, n] that it filled, the sum of the
    head ``calls`` of their tokens, and the number of ``steps`` of a token's chain.
    """

    places: Tensor
    calls: int
    steps: int


@dataclass
class MARProgress:
    """The state after an iteration: ``tokens`` [B, L, C], ``count`` of each picture drawn."""

    state: ClassVar[tuple[str, ...]] = ("tokens",)
    tokens: Tensor
    count: int
    stats: ChainStats = field(default_factory=ChainStats)


@torch.inference_mode()
def decode_mar(
    model: MAR,
    labels: Tensor | None,
    orders: Tensor,
    sampler: MARSampler,
    settings: MARSettings,
    conditions: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Iterator[MARProgress]:
    """Draw pictures of classes ``labels`` [B] (None: no class) in the ``orders`` [B, L] of tokens.

    ``conditions`` may be a faster equivalent of :func:`head_conditions`. Yields after each
    iteration; the last yield has the stats of the whole run. Raises ``ValueError`` for guidance
    without ``fake_latent``.
    """
    start = time.perf_counter()
    clock = Clock()
    stats = ChainStats()
    batch, length = orders.shape
    classes = class_conditions(model, labels, batch, settings.cfg)
    shape = batch, length, model.config.token_dim
    tokens = torch.zeros(shape, dtype=torch.float32, device=orders.device)
    conditions = conditions or partial(head_conditions, model)
    progress = MARProgress(tokens, 0)
    for step in settings.iterations(length):
        places = orders[:, step.first : step.last].sort(-1).values
        known = orders[:, step.last :]
        with clock("verify"):
            z = conditions(tokens, known, classes, places)
        with clock("head"):
            drawn, calls = sampler.sample(HeadCondition(z, step.scale), [places.shape[1]] * batch)
        write_tokens(tokens, places, drawn)
        progress.count += places.shape[1]
        tell(HeadCalls(places, calls, len(sampler.head.times)))
        stats.head_calls += calls
        stats.rounds += batch
        stats.batch_rounds += 1
        look_again()
        yield progress
    stats.tokens = batch * length
    stats.seconds = time.perf_counter() - start
    stats.head_seconds = clock.seconds["head"]
    stats.verify_seconds = clock.seconds["verify"] + stats.head_seconds
    progress.stats = stats
    yield progress


def class_conditions(model: MAR, labels: Tensor | None, batch: int, cfg: float) -> Tensor:
    """Conditions [G · B, D]: the pictures' classes, then (under guidance) B times "no class"."""
    with_class = model.embed_classes(labels, batch)
    return with_class if cfg == 1.0 else torch.cat([with_class, model.embed_classes(None, batch)])


def head_conditions(
    model: MAR, tokens: Tensor, known: Tensor, classes: Tensor, wanted: Tensor
) -> Tensor:
    """z [B · n, G, Z] at ``wanted`` [B, n] given ``known`` [B, K] of ``tokens`` [B, L, C].

    ``classes`` from ``class_conditions``.
    """
    branches = len(classes) // len(tokens)

    def rows(x: Tensor) -> Tensor:
        return x if branches == 1 else x.repeat(branches, *[1] * (x.ndim - 1))

    with attention_of_any_length():
        z = model(rows(tokens), rows(known), classes, rows(wanted))
    return z.view(branches, -1, z.shape[-1]).transpose(0, 1)


def write_tokens(tokens: Tensor, where: Tensor, rows: Tensor) -> None:
    """Write ``rows`` [B · n, C] to positions ``where`` [B, n] of ``tokens`` [B, L, C]."""
    rows = rows.view(*where.shape, -1).to(tokens.dtype)
    tokens.scatter_(1, where[:, :, None].expand(-1, -1, tokens.shape[-1]), rows)
