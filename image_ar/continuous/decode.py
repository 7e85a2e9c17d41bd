"""The loop over a picture's iterations: the transformer says under what, a sampler says which
tokens.

Shape letters: B pictures, L tokens a picture, n tokens of an iteration, R = B·n, G branches (2 with
guidance), C token width, Z width of the head's condition. A round is one pass of the target's
transformer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from specmm.image_ar.continuous.chain import Condition
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.orders import CFGSchedule, iterations
from specmm.stats import Clock, Stats


@dataclass
class ChainStats(Stats):
    """Counts of a run of continuous tokens; ``rounds`` are passes of the target's transformer.

    ``head_calls`` sums, over tokens, the target's head calls a token waited for; ``accepted`` of
    ``drafted`` tokens were kept by variants that draft whole tokens.
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
        """Share of drafted tokens that were kept; 0 when none were drafted."""
        return self.accepted / max(self.drafted, 1)

    def as_dict(self) -> dict[str, Any]:
        """What a report says, for JSON."""
        own = {"head_calls_per_token": self.head_calls_per_token, "acceptance": self.acceptance}
        return super().as_dict() | own

    def add(self, other: Stats) -> None:
        """Add another run's counts."""
        super().add(other)
        for name in ("head_calls", "head_seconds", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name, 0))


@dataclass(frozen=True)
class Plan:
    """How a picture is made: iterations, head steps (``Schedule.of``), guidance, temperature of the
    head.
    """

    num_iter: int = 64
    head_steps: str = "100"
    cfg: float = 1.0
    cfg_schedule: CFGSchedule = "linear"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.num_iter < 1:
            raise ValueError(f"num_iter must be at least 1, got {self.num_iter}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.cfg < 0:
            raise ValueError(f"cfg must be at least 0, got {self.cfg}")


@dataclass
class Sampled:
    """Tokens [R, C] and the head calls that each of them waited for, summed."""

    tokens: Tensor
    head_calls: int


@dataclass
class View:
    """What an iteration sees: ``tokens`` [B, L, C], of which those at ``known`` [B, K], to make
    those at ``wanted``.
    """

    tokens: Tensor
    known: Tensor
    wanted: Tensor


class Sampler(Protocol):
    """Draws the tokens of one iteration."""

    def sample(self, condition: Condition, view: View) -> Sampled:
        """Tokens [B · n, C] at ``view.wanted`` under ``condition``, which the target made of
        ``view``.
        """
        ...


@dataclass
class Progress:
    """The state after an iteration: ``tokens`` [B, L, C], of which ``count`` of each picture are
    made.
    """

    tokens: Tensor
    count: int
    stats: ChainStats = field(default_factory=ChainStats)


@torch.inference_mode()
def decode_mar(
    model: MAR, labels: Tensor | None, orders: Tensor, sampler: Sampler, plan: Plan
) -> Iterator[Progress]:
    """Make pictures of classes ``labels`` [B] (None: no class) in their ``orders`` [B, L], yielding
    each iteration.

    The stats of the last yield are those of the run. Raises ``ValueError`` for guidance without
    ``fake_latent``.
    """
    start, clock = time.perf_counter(), Clock()
    batch, length = orders.shape
    condition = conditions(model, labels, batch, plan.cfg)
    tokens = torch.zeros(batch, length, model.config.token_dim, device=orders.device)
    progress, calls, passes = Progress(tokens, 0), 0, 0
    for part in iterations(length, plan.num_iter, plan.cfg, plan.cfg_schedule):
        wanted, known = orders[:, part.first : part.last].sort(-1).values, orders[:, part.last :]
        with clock("verify"):
            z = ask(model, tokens, known, condition, wanted)
        with clock("head"):
            made = sampler.sample(Condition(z, part.scale), View(tokens, known, wanted))
        put(tokens, wanted, made.tokens)
        progress.count += wanted.shape[1]
        calls, passes = calls + made.head_calls, passes + 1
        yield progress
    progress.stats = _stats(batch, length, passes, calls, time.perf_counter() - start, clock)
    yield progress


def conditions(model: MAR, labels: Tensor | None, batch: int, cfg: float) -> Tensor:
    """Conditions [G · B, D] of the rows: the pictures' own, then "no class" when there is guidance."""
    own = model.embed_classes(labels, batch)
    return own if cfg == 1.0 else torch.cat([own, model.embed_classes(None, batch)])


def ask(
    model: MAR,
    tokens: Tensor,
    known: Tensor,
    condition: Tensor,
    wanted: Tensor,
    valid: Tensor | None = None,
) -> Tensor:
    """The head's conditions [B · n, G, Z] at ``wanted`` [B, n] given ``known`` [B, K] of ``tokens``
    [B, L, C].
    """
    branches = len(condition) // len(tokens)
    rows: Sequence[Tensor | None] = (tokens, known, wanted, valid)
    if branches > 1:
        rows = [None if x is None else x.repeat(branches, *[1] * (x.ndim - 1)) for x in rows]
    x, seen, where, counted = rows
    assert x is not None and seen is not None
    z = model(x, seen, condition, where, counted)
    return z.unflatten(0, (branches, -1)).permute(1, 2, 0, 3).flatten(0, 1)


def put(tokens: Tensor, where: Tensor, made: Tensor) -> None:
    """Write tokens ``made`` [B · n, C] at ``where`` [B, n] of ``tokens`` [B, L, C]."""
    rows = made.view(*where.shape, -1).to(tokens.dtype)
    tokens.scatter_(1, where[:, :, None].expand(-1, -1, tokens.shape[-1]), rows)


def _stats(
    batch: int, length: int, passes: int, calls: int, seconds: float, clock: Clock
) -> ChainStats:
    head = clock.seconds["head"]
    stats = ChainStats(
        batch * length, batch * passes, passes, seconds, 0.0, clock.seconds["verify"] + head
    )
    stats.head_calls, stats.head_seconds = calls, head
    return stats
