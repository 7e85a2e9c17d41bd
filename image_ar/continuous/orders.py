"""Options of MAR's sampling, the order of a picture's tokens, and its random numbers.

Source: MAR (arXiv 2406.11838, sections 3.4-3.5 and the release's cosine schedule). Shape letters: B
pictures, L tokens, n iterations. An order is read from its end: the last entries are drawn first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from specmm.extending.kinds import check_at_least, check_whole

CFGSchedule = Literal["linear", "constant"]
Solver = Literal["ddpm", "ddim"]

BLOCK = 16384  # numbers drawn from a generator at a time
GPU_BLOCK = 131_072  # drawing more at a time costs no more there


@dataclass(frozen=True)
class MARSettings:
    """Options of sampling; ``settings.json`` beside a model holds the recommended values.

    Iterations, head steps (``NoiseSchedule.of``), guidance, temperature of the head and its solver;
    ``classes`` are names by id. Raises ``ValueError`` for options out of range.
    """

    num_iter: int = 64
    head_steps: str = "100"
    cfg: float = 1.0
    cfg_schedule: CFGSchedule = "linear"
    temperature: float = 1.0
    solver: Solver = "ddpm"
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_steps", str(self.head_steps))  # users also give numbers
        check_whole(num_iter=self.num_iter)
        if self.num_iter < 1:
            raise ValueError(f"num_iter must be at least 1, got {self.num_iter}")
        check_at_least(0, temperature=self.temperature, cfg=self.cfg)
        if self.solver not in ("ddpm", "ddim"):
            raise ValueError(f"solver must be 'ddpm' or 'ddim', got {self.solver!r}")
        if self.cfg_schedule not in ("linear", "constant"):
            raise ValueError(
                f"cfg_schedule must be 'linear' or 'constant', got {self.cfg_schedule!r}"
            )

    def spaced(self, steps: str | int | None) -> str | int | None:
        """``steps`` as a spec for ``NoiseSchedule.of``: a number becomes that many steps in the
        spacing of these settings.

        A plain "100" begins at the noisiest of all 1000 timesteps, where the head's prediction is
        divided by √ᾱ = 1/20,000; "ddim100" leaves that timestep out. A head trained for one spacing
        draws only noise with the other.
        """
        ddim = self.head_steps.startswith("ddim") and isinstance(steps, int)
        return f"ddim{steps}" if ddim else steps

    @property
    def claimed(self) -> dict[str, object]:
        """The options that shape the distribution, for certificates: DDIM has no temperature."""
        option = "temperature" if self.solver == "ddpm" else "solver"
        guided = ["cfg_schedule"] if self.cfg != 1 else []
        names = ["num_iter", "head_steps", option, "cfg", *guided]
        return {name: getattr(self, name) for name in names}

    def iterations(self, length: int) -> list[Iteration]:
        """The iterations that draw the L = ``length`` tokens of a picture, from part (…, L) of the
        orders down to (0, …).

        The guidance scale rises from 1 to nearly ``cfg`` as tokens become known (``linear``), or is
        ``cfg`` throughout (``constant``).
        """
        masked = mask_lengths(length, self.num_iter)
        groups = []
        for (last, first), unknown in zip(pairwise([length, *masked[:-1], 0]), masked, strict=True):
            rising = 1 + (self.cfg - 1) * (length - unknown) / length
            if first < last:
                scale = self.cfg if self.cfg_schedule == "constant" else rising
                groups.append(Iteration(first, last, scale))
        return groups


def random_orders(generators: Sequence[torch.Generator], length: int) -> Tensor:
    """One permutation of 0 … L-1 a picture, from its own generator: [B, L] int64."""
    return torch.stack([torch.randperm(length, generator=g, device=g.device) for g in generators])


def mask_lengths(length: int, iterations: int) -> list[int]:
    """Number of tokens still unknown after each of n iterations, by MAR's cosine schedule.

    Every iteration draws at least one token and leaves at least one for the last iteration, which
    draws all that remain. With more iterations than tokens the number stays at 1, and the
    iterations in between draw nothing.
    """
    lengths = []
    masked = length
    for k in range(iterations):
        cosine = math.floor(length * math.cos(math.pi / 2 * (k + 1) / iterations))
        masked = max(1, min(masked - 1, cosine))
        lengths.append(masked)
    return lengths


@dataclass(frozen=True)
class Iteration:
    """The part [``first``, ``last``) of the orders to make, under the guidance ``scale``."""

    first: int
    last: int
    scale: float


class Stream(Protocol):
    """Source of samplers' random numbers."""

    def draw(self, rows: Sequence[int], width: int) -> Tensor:
        """The next [sum(rows), ``width``] numbers, ``rows[b]`` rows of picture b."""


class PictureStreams:
    """A stream of random numbers for each picture, drawn from its own generator in the order of
    use.

    Pictures of a batch use different amounts, because their accepted lengths differ. With its own
    stream a picture does not depend on its batch.
    """

    def __init__(
        self, generators: Sequence[torch.Generator], fill: Callable[[int, torch.Generator], Tensor]
    ) -> None:
        self.generators = list(generators)
        self.fill = fill
        self._blocks = [fill(0, g) for g in self.generators]
        self._used = [0] * len(self.generators)
        self._held = [0] * len(self.generators)

    def draw(self, rows: Sequence[int], width: int) -> Tensor:
        parts = [self._take(b, n * width) for b, n in enumerate(rows) if n]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1, width)

    def ahead(self, b: int, most: int) -> Tensor:
        """The next numbers of picture b that have been drawn already, at most ``most``."""
        return self._blocks[b][self._used[b] : self._used[b] + most]

    def skip(self, b: int, count: int) -> None:
        """Count the next ``count`` of ``ahead`` as used."""
        self._used[b] += count

    def draw_ahead(self, b: int, count: int = 0) -> None:
        """Draw picture b's next block of at least ``count`` numbers, as ``draw`` would."""
        generator = self.generators[b]
        block = GPU_BLOCK if generator.device.type == "cuda" else BLOCK
        fresh = self.fill(max(block, count), generator)
        self._blocks[b] = torch.cat([self._blocks[b][self._used[b] :], fresh])
        self._used[b] = 0
        self._held[b] = len(self._blocks[b])

    def _take(self, b: int, count: int) -> Tensor:
        """The next ``count`` numbers of picture ``b``."""
        if self._held[b] - self._used[b] < count:
            self.draw_ahead(b, count)
        first = self._used[b]
        self._used[b] += count
        return self._blocks[b][first : first + count]


def normals(generators: Sequence[torch.Generator]) -> PictureStreams:
    """Standard normal numbers, float32."""
    return PictureStreams(
        generators,
        lambda count, g: torch.randn(count, generator=g, device=g.device, dtype=torch.float32),
    )


def log_uniforms(generators: Sequence[torch.Generator]) -> PictureStreams:
    """Logarithms of uniforms in (0, 1], float32, to compare with ratios in the log domain."""
    return PictureStreams(
        generators,
        lambda count, g: (
            1 - torch.rand(count, generator=g, device=g.device, dtype=torch.float32)
        ).log_(),
    )
