"""Uniform numbers from the caller's generators, one generator a sample.

A row's numbers depend on its own generator and on how many it has used, never on the rest of the
batch.

Shape letters: B batch, L numbers drawn beforehand, V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Protocol

import torch
from torch import Tensor

from specmm.core.state import without
from specmm.extending.kinds import shown

BLOCK = 4096  # numbers drawn from a generator at a time
FRESH = 2**53  # seeds below it are drawn: JSON keeps them
GPU_BLOCK = 65_536  # trees of siblings without replacement take as many numbers a round


class UniformSource(Protocol):
    """Uniforms in [0, 1) for each of B rows."""

    def draw(self, count: int) -> Tensor:
        """The next ``count`` numbers of every row, [B, count]."""


class Streams(UniformSource, Protocol):
    """A stream of uniforms for each row; rows can be given new streams."""

    def ahead(self, count: int) -> Tensor:
        """The numbers [B, count] that are drawn next."""

    def start_row(self, row: int, generator: torch.Generator) -> Tensor:
        """From now on ``row`` draws from ``generator``; returns its first number [1]."""


class PredrawnUniforms:
    """A source of ``numbers`` [B, L] drawn beforehand."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.used = 0

    def draw(self, count: int) -> Tensor:
        self.used += count
        return self.numbers[:, self.used - count : self.used]


class CountedUniforms:
    """The source ``inner`` that also counts the numbers drawn from it."""

    def __init__(self, inner: UniformSource) -> None:
        self.inner = inner
        self.used = 0

    def draw(self, count: int) -> Tensor:
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
        # numbers of each row that are drawn but not yet in the block
        self._rest = list(self._block.unbind(0))

    @classmethod
    def from_seeds(cls, seeds: Sequence[int], device: torch.device | str = "cpu") -> Uniforms:
        """Streams of fresh generators on ``device`` with these seeds."""
        return cls([torch.Generator(device).manual_seed(s) for s in seeds])

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self.generators[0].device

    def draw(self, count: int) -> Tensor:
        """The next ``count`` numbers of every row: [B, count]."""
        unused = self._block.shape[1] - self._used
        if unused < count:
            fresh = [self._next(row, max(BLOCK, count)) for row in range(len(self.generators))]
            self._block = torch.cat([self._block[:, self._used :], torch.stack(fresh)], dim=1)
            self._used = 0
        block = self._block[:, self._used : self._used + count]
        self._used += count
        return block

    def ahead(self, count: int) -> Tensor:
        drawn = self.draw(count)
        self._used -= count
        return drawn

    def start_row(self, row: int, generator: torch.Generator) -> Tensor:
        """Let ``row`` continue with a new ``generator``; returns its first number [1]."""
        self.generators[row] = generator
        self._rest[row] = self._rest[row][:0]
        first = self._next(row, 1)
        self._block[row, self._used :] = self._next(row, self._block.shape[1] - self._used)
        return first

    def _next(self, row: int, count: int) -> Tensor:
        """The next ``count`` numbers of a row's stream."""
        generator = self.generators[row]
        device = generator.device
        # always whole blocks: on a GPU a stream depends on how many numbers a call draws
        size = GPU_BLOCK if device.type == "cuda" else BLOCK
        numbers = self._rest[row]
        if len(numbers) < count:
            blocks = range(math.ceil((count - len(numbers)) / size))
            fresh = [
                torch.rand(size, generator=generator, device=device, dtype=self.dtype)
                for _ in blocks
            ]
            numbers = torch.cat([numbers, *fresh])
        self._rest[row] = numbers[count:]
        return numbers[:count]


class RowNumbers:
    """A uniform for each token of a row, by its position: number i of the row's generator is for
    its token i, whatever was drafted.
    """

    def __init__(self) -> None:
        self.numbers = torch.empty(0, 0)  # [B, T]
        self.counts = torch.empty(0, dtype=torch.int64)  # [B], tokens that rows have

    @classmethod
    def of(cls, uniforms: Uniforms, count: int) -> RowNumbers:
        """The next ``count`` numbers of each row of ``uniforms``, whose rows have no tokens yet."""
        rows = cls()
        rows.numbers = uniforms.draw(count).clone()
        rows.counts = torch.zeros(len(rows.numbers), dtype=torch.int64, device=uniforms.device)
        return rows

    def join(self, generator: torch.Generator, count: int) -> Tensor:
        """Add a row at the end, with at most ``count`` numbers; returns its first number [1]."""
        drawn = Uniforms([generator]).draw(count)
        rows, width = self.numbers.shape
        numbers = drawn.new_zeros(rows + 1, max(width, count))
        numbers[:rows, :width] = self.numbers
        numbers[rows, :count] = drawn[0]
        self.numbers = numbers
        return drawn[0, :1]

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        self.numbers = without(self.numbers, row)

    def start_row(self, row: int, generator: torch.Generator) -> Tensor:
        self.numbers[row] = Uniforms([generator]).draw(self.numbers.shape[1])[0]
        return self.numbers[row, :1]

    def draw(self, count: int) -> Tensor:
        """The numbers [B, count] for each row's next tokens; an ended row has any."""
        places = self.counts[:, None] + torch.arange(count, device=self.counts.device)
        return self.numbers.gather(1, places.clamp(max=self.numbers.shape[1] - 1))

    ahead = draw


def categorical(probs: Tensor, uniform: Tensor) -> Tensor:
    """One index [...] by ``uniform`` [...] in [0, 1) from ``probs`` [..., V] of any positive total.

    By the inverse of the cumulative sum. An index of probability 0 is never returned.
    """
    cumulative = probs.cumsum(-1, dtype=torch.promote_types(probs.dtype, uniform.dtype))
    threshold = (uniform * cumulative[..., -1]).unsqueeze(-1)
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return index.clamp_(max=probs.shape[-1] - 1)


def sample_generators(
    count: int,
    device: torch.device,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    seed: int | Sequence[int] | None = None,
) -> list[torch.Generator]:
    """A fresh generator on ``device`` for each of ``count`` samples; its ``initial_seed()`` alone
    draws the sample again.

    There is a ``seed`` or ``generator`` for each, or one for the first: the others have the seeds
    that follow. A generator stands for its seed or, if it was used before, for a number drawn from
    it; this draws once from it, so that a second call gives other samples. Without either, seeds
    are random. Raises ``ValueError`` for both, for another number of them, and for other types.
    """
    if seed is not None and generator is not None:
        raise ValueError("give seed or generator, not both")
    name, value, read = ("generator", generator, _spent) if seed is None else ("seed", seed, _valid)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != count:
            raise ValueError(
                f"{name} must be one or one for each of the {count} samples, got {len(value)}"
            )
        seeds = [read(item) for item in value]
    else:
        first = secrets.randbelow(FRESH) if value is None else read(value)
        seeds = [first + i for i in range(count)]
    return [torch.Generator(device).manual_seed(number % 2**64) for number in seeds]


def _valid(seed: object) -> int:
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise ValueError(f"seed must be a whole number or a list of them, got {shown(seed)}")
    if not -(2**63) <= int(seed) < 2**64:
        raise ValueError(f"seed must be from -2^63 to 2^64 - 1, got {seed}")
    return int(seed)


def _spent(generator: object) -> int:
    """The seed that ``generator`` stands for; draws one number from it."""
    if not isinstance(generator, torch.Generator):
        raise ValueError(
            "generator must be a torch.Generator or a list of them, such as "
            f"torch.Generator().manual_seed(3), got {shown(generator)}"
        )
    seed = generator.initial_seed()
    unused = torch.Generator(generator.device).manual_seed(seed).get_state()
    used = not torch.equal(unused, generator.get_state())
    drawn = int(torch.randint(FRESH, (), generator=generator, device=generator.device))
    return drawn if used else seed


def further(generator: torch.Generator) -> torch.Generator:
    """Another generator with its own stream, derived from ``generator`` without moving it."""
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    seed = int(torch.randint(2**62, (), generator=copy, device=copy.device))
    return torch.Generator(copy.device).manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block whose random numbers come from ``seed``; restores the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
