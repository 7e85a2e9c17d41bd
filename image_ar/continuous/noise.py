"""Random numbers of a picture, from its own generator, in the order the picture asks for them.

Pictures of a batch ask for different amounts, since their chains are accepted at different lengths;
each has a stream of its own, so that a picture does not depend on the batch it is drawn in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 16384  # numbers drawn from a generator at a time

Fill = Callable[[int, torch.Generator], Tensor]


class Numbers(Protocol):
    """Where samplers get their numbers."""

    def draw(self, rows: Sequence[int], width: int) -> Tensor:
        """The next ``width`` numbers for each of ``rows[b]`` rows of every picture b: [sum(rows),
        width].
        """
        ...


class Stream:
    """Numbers of one kind from one generator a picture."""

    def __init__(self, generators: Sequence[torch.Generator], fill: Fill) -> None:
        self.generators, self.fill = list(generators), fill
        self._blocks = [fill(0, g) for g in self.generators]
        self._used, self._held = [0] * len(self.generators), [0] * len(self.generators)

    def draw(self, rows: Sequence[int], width: int) -> Tensor:
        """See ``Numbers``."""
        parts = [self._take(b, n * width) for b, n in enumerate(rows) if n]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1, width)

    def _take(self, b: int, count: int) -> Tensor:
        if self._held[b] - self._used[b] < count:
            fresh = self.fill(max(BLOCK, count), self.generators[b])
            self._blocks[b] = torch.cat([self._blocks[b][self._used[b] :], fresh])
            self._used[b], self._held[b] = 0, len(self._blocks[b])
        first = self._used[b]
        self._used[b] += count
        return self._blocks[b][first : first + count]


def normals(generators: Sequence[torch.Generator]) -> Stream:
    """Standard normal numbers, float32."""
    return Stream(generators, lambda count, g: torch.randn(count, generator=g, device=g.device))


def log_uniforms(generators: Sequence[torch.Generator]) -> Stream:
    """Logarithms of uniform numbers in (0, 1], float32: what a ratio in the log domain is compared
    with.
    """
    return Stream(
        generators, lambda count, g: (1 - torch.rand(count, generator=g, device=g.device)).log_()
    )
