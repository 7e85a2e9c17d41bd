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
    """Counts of a run of continuous tokens; ``rounds`` are passes of the target's transformer.

    ``head_calls`` sums, over tokens, the target's head calls a token waited for; ``drafted`` and
    ``accepted`` count tokens in variants that draft whole tokens.
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
        own = {"head_calls_per_token": self.head_calls_per_token, "acceptance": self.acceptance}
        return super().as_dict() | own

    def add(self, other: Stats) -> None:
        """Add another run's counts."""
        super().add(other)
        for name in ("head_calls", "head_seconds", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name, 0))


class MARSampler(Protocol):
    """Draws the tokens of one iteration by the ``head``."""

    head: ChainHead

    def sample(self, condition: HeadCondition, rows: list[int]) -> tuple[Tensor, int]:
        """``rows[b]`` tokens of each picture b [R, C] under ``condition``, and the sum of the head
        calls each waited for.
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
    """Event for watchers after an iteration: the ``places`` [B, n] it filled, the sum of the head
    ``calls`` that their tokens waited for, and the ``steps`` of a token's chain.
    """

    places: Tensor
    calls: int
    steps: int


@dataclass
class MARProgress:
    """The state after an iteration: ``tokens`` [B, L, C], of which ``count`` a picture are made."""

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
    for part in settings.iterations(length):
        wanted = orders[:, part.first : part.last].sort(-1).values
        known = orders[:, part.last :]
        with clock("verify"):
            z = conditions(tokens, known, classes, wanted)
        with clock("head"):
            made, calls = sampler.sample(HeadCondition(z, part.scale), [wanted.shape[1]] * batch)
        write_tokens(tokens, wanted, made)
        progress.count += wanted.shape[1]
        tell(HeadCalls(wanted, calls, len(sampler.head.times)))
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
    """Conditions [G · B, D] of the rows: the pictures' own, then "no class" under guidance."""
    own = model.embed_classes(labels, batch)
    return own if cfg == 1.0 else torch.cat([own, model.embed_classes(None, batch)])


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
