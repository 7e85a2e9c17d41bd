"""Uniform numbers from the caller's generators, one generator a sample.

A row's numbers depend on its own generator and on how many it has used, never on the rest of the
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# numbers drawn from a generator at a time: few calls, and a picture of few tokens wastes few
BLOCK = 4096


class UniformSource(Protocol):
    """Uniforms in [0, 1) for each of B rows, drawn as they are needed or dealt beforehand."""

    def draw(self, count: int) -> Tensor:
        """The next ``count`` numbers of every row, [B, count]."""


class Dealt:
    """Uniforms: uniform ``numbers`` [B, L] drawn beforehand, handed out in order."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.used = numbers, 0

    def draw(self, count: int) -> Tensor:
        """The next ``count`` numbers of every row, [B, count]."""
        self.used += count
        return self.numbers[:, self.used - count : self.used]


class Counted:
    """Uniforms that count what is drawn of ``inner``."""

    def __init__(self, inner: UniformSource) -> None:
        self.inner, self.used = inner, 0

    def draw(self, count: int) -> Tensor:
        """The next ``count`` numbers of every row, [B, count]."""
        self.used += count
        return self.inner.draw(count)


class Uniforms:
    """A stream of uniforms in [0, 1) for each of B rows."""

    def __init__(
        self, generators: Sequence[torch.Generator], dtype: torch.dtype = torch.float32
    ) -> None:
        self.generators = list(generators)
        self.dtype = dtype
        self._block = torch.empty(len(self.generators), 0, dtype=dtype, device=self.device)
        self._used = 0
        self._rest = [
            self._block[row] for row in range(len(self._block))
        ]  # drawn, but not yet in the block

    @classmethod
    def from_seeds(cls, seeds: Sequence[int]) -> Uniforms:
        """Streams of fresh CPU generators with these seeds."""
        return cls([torch.Generator().manual_seed(s) for s in seeds])

    @property
    def device(self) -> torch.device:
        """Where the numbers live."""
        return self.generators[0].device

    def draw(self, count: int) -> Tensor:
        """The next ``count`` numbers of every row, [B, count]."""
        left = self._block.shape[1] - self._used
        if left < count:
            fresh = [self._next(row, max(BLOCK, count)) for row in range(len(self.generators))]
            self._block = torch.cat([self._block[:, self._used :], torch.stack(fresh)], dim=1)
            self._used = 0
        taken = self._block[:, self._used : self._used + count]
        self._used += count
        return taken

    def start_row(self, row: int, generator: torch.Generator) -> Tensor:
        """From here on ``row`` draws from ``generator``, whose first number [1] is returned."""
        self.generators[row], self._rest[row] = generator, self._rest[row][:0]
        first = self._next(row, 1)
        self._block[row, self._used :] = self._next(row, self._block.shape[1] - self._used)
        return first

    def _next(self, row: int, count: int) -> Tensor:
        """The next ``count`` numbers of a row's stream."""
        g, blocks = self.generators[row], -(-max(count - len(self._rest[row]), 0) // BLOCK)
        if (
            blocks
        ):  # always whole ones: on a GPU a stream depends on how many numbers are drawn at a time
            more = [
                torch.rand(BLOCK, generator=g, device=g.device, dtype=self.dtype)
                for _ in range(blocks)
            ]
            self._rest[row] = torch.cat([self._rest[row], *more])
        taken, self._rest[row] = self._rest[row].split([count, len(self._rest[row]) - count])
        return taken


def categorical(probs: Tensor, uniform: Tensor) -> Tensor:
    """One index per row of ``probs`` [..., V] (any positive total) by the inverse of its cumulative
    sum.

    ``uniform`` [...] in [0, 1). An index of zero weight is never returned.
    """
    cumulative = probs.cumsum(-1, dtype=torch.promote_types(probs.dtype, uniform.dtype))
    wanted = (uniform * cumulative[..., -1]).unsqueeze(-1)
    return (
        torch.searchsorted(cumulative, wanted, right=True)
        .squeeze(-1)
        .clamp_(max=probs.shape[-1] - 1)
    )


def sample_generators(
    given: torch.Generator | Sequence[torch.Generator] | None, count: int, device: torch.device
) -> list[torch.Generator]:
    """One generator a picture, on ``device``: those given, or new ones seeded from the one given
    (or fresh entropy).

    Of those given, one on another kind of device seeds one that takes its place.
    """
    if isinstance(given, Sequence):
        if len(given) != count:
            raise ValueError(
                f"generator must be one or one for each of the {count} pictures, got {len(given)}"
            )
        return [g if g.device.type == device.type else _seeded(g, 1, device)[0] for g in given]
    source = given or torch.Generator()
    if given is None:
        source.seed()
    return _seeded(source, count, device)


def _seeded(source: torch.Generator, count: int, device: torch.device) -> list[torch.Generator]:
    """``count`` generators on ``device``, their seeds drawn from ``source``."""
    seeds = torch.randint(2**62, (count,), generator=source, device=source.device).tolist()
    return [torch.Generator(device).manual_seed(s) for s in seeds]
