"""Samplers of an iteration's tokens by the target's own head: plainly, deterministically, or
speculating on it.

Shape letters as in ``decode.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from specmm.image_ar.continuous.chain import (
    BoundHead,
    ChainHead,
    Condition,
    Steps,
    ancestral,
    deterministic,
)
from specmm.image_ar.continuous.decode import Sampled, View, ask
from specmm.image_ar.continuous.mar import MAR
from specmm.image_ar.continuous.noise import Numbers
from specmm.image_ar.continuous.speculate import Options, WindowTables, speculate


@dataclass
class Ancestral:
    """DDPM as published: one head call a step."""

    head: ChainHead
    normal: Numbers
    temperature: float = 1.0
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = Steps.ddpm(self.head.schedule)

    def sample(self, condition: Condition, view: View) -> Sampled:
        """See ``Sampler``."""
        count, width = len(self.head.times), self.head.channels
        noise = (
            self.normal.draw(rows_of(view), (count + 1) * width)
            .view(-1, count + 1, width)
            .transpose(0, 1)
        )
        tokens = ancestral(self.head.bind(condition), self.steps, noise, self.temperature)
        return Sampled(tokens, count * len(tokens))


@dataclass
class Deterministic:
    """DDIM: noise at the start only, so that fewer steps do; not the distribution of DDPM."""

    head: ChainHead
    normal: Numbers
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = Steps.ddim(self.head.schedule)

    def sample(self, condition: Condition, view: View) -> Sampled:
        """See ``Sampler``."""
        start = self.normal.draw(rows_of(view), self.head.channels)
        tokens = deterministic(self.head.bind(condition), self.steps, start)
        return Sampled(tokens, len(self.head.times) * len(tokens))


@dataclass
class SmallHead:
    """A smaller model whose head drafts: it is asked for its own condition at every iteration.

    ``condition`` [G · B, D] from ``decode.conditions``.
    """

    model: MAR
    head: ChainHead
    condition: Tensor

    def bind(self, view: View, scale: float | Tensor) -> BoundHead:
        """Its head bound to the tokens wanted."""
        z = ask(self.model, view.tokens, view.known, self.condition, view.wanted)
        return self.head.bind(Condition(z, scale))


@dataclass
class Speculative:
    """DDPM's distribution in fewer sequential head calls (``speculate.py``)."""

    head: ChainHead
    normal: Numbers
    log_uniform: Numbers
    window: int = 16
    options: Options = field(default_factory=Options)
    small: SmallHead | None = None
    tables: WindowTables = field(init=False)

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must be at least 2 steps, got {self.window}")
        self.tables = WindowTables(self.head.schedule, self.window)

    def sample(self, condition: Condition, view: View) -> Sampled:
        """See ``Sampler``."""
        bound = self.head.bind(condition)
        small = None if self.small is None else self.small.bind(view, condition.scale)
        rows = rows_of(view)
        made = speculate(
            bound, self.tables, rows, self.normal, self.log_uniform, self.options, small
        )
        return Sampled(made.tokens, sum(made.row_calls))


def rows_of(view: View) -> list[int]:
    """How many tokens each picture gets."""
    return [view.wanted.shape[1]] * len(view.wanted)
