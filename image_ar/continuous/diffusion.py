"""Gaussian diffusion of a token: MAR's cosine noise schedule, respaced, and the steps of a chain.

Sources: DDPM (arXiv 2006.11239, equations 6-7), improved DDPM (arXiv 2102.09672: cosine schedule,
learned variance), DDIM (arXiv 2010.02502). Tables are float64 and made once. Shape letters: S
spaced steps, N rows, C token width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BASE_STEPS = 1000
MAX_BETA = 0.999


def cosine_betas(steps: int = BASE_STEPS) -> Tensor:
    """Betas [steps] of the cosine schedule, float64."""

    def level(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    return torch.tensor(
        [min(1 - level((i + 1) / steps) / level(i / steps), MAX_BETA) for i in range(steps)],
        dtype=torch.float64,
    )


def spaced_timesteps(spec: str, steps: int = BASE_STEPS) -> list[int]:
    """Original timesteps kept by ``spec``, as the release writes it.

    "" is all, "100" strided with both ends, "10,20" by section, "ddim50" strided evenly. Raises
    ``ValueError`` for a spec that does not fit ``steps``.
    """
    if not spec:
        return list(range(steps))
    count = spec.removeprefix("ddim")
    if not all(part.isdecimal() and int(part) > 0 for part in count.split(",")):
        raise ValueError(
            f"head steps must be a number, numbers with commas or 'ddim' and a number, got {spec!r}"
        )
    if spec.startswith("ddim"):
        return _even(int(count), steps)
    sections = [int(part) for part in count.split(",")]
    timesteps: list[int] = []
    first = 0
    for i, chosen in enumerate(sections):
        size = steps // len(sections) + (i < steps % len(sections))
        timesteps += [first + offset for offset in _strided(chosen, size)]
        first += size
    return sorted(set(timesteps))


def _even(wanted: int, steps: int) -> list[int]:
    """``wanted`` of ``steps`` timesteps with an integer stride, for "ddim" specs."""
    strides = {len(range(0, steps, stride)): stride for stride in range(steps, 0, -1)}
    if wanted in strides:
        return list(range(0, steps, strides[wanted]))
    near = min(strides, key=lambda count: abs(count - wanted))
    raise ValueError(
        f"'ddim' must be followed by a number that strides {steps} steps evenly, got {wanted}: "
        f"take {near}"
    )


def _strided(wanted: int, size: int) -> list[int]:
    """``wanted`` offsets below ``size`` with a fractional stride, both ends included."""
    if wanted > size:
        raise ValueError(f"head steps must be at most {size} in each section, got {wanted}")
    stride = 1.0 if wanted == 1 else (size - 1) / (wanted - 1)
    offsets = []
    at = 0.0
    for _ in range(wanted):
        offsets.append(round(at))
        at += stride  # summed, not multiplied: the release's rounding
    return offsets


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """Tables [S] of a respaced schedule by the spaced step i (0 is the cleanest), float64."""

    timestep_map: Tensor  # original timesteps, int64
    alphas_cumprod: Tensor

    @classmethod
    def of(cls, spec: str = "100") -> NoiseSchedule:
        """The cosine schedule respaced by ``spec`` (``spaced_timesteps``)."""
        timesteps = torch.tensor(spaced_timesteps(spec))
        return cls(timesteps, (1 - cosine_betas()).cumprod(0)[timesteps])

    def __len__(self) -> int:
        return len(self.timestep_map)

    @cached_property
    def alphas_cumprod_prev(self) -> Tensor:
        """The next cleaner step's level; 1 after the last."""
        return torch.cat([self.alphas_cumprod.new_ones(1), self.alphas_cumprod[:-1]])

    @cached_property
    def betas(self) -> Tensor:
        """Variances added from step to step, recomputed from the levels kept."""
        return 1 - self.alphas_cumprod / self.alphas_cumprod_prev

    @cached_property
    def posterior_variance(self) -> Tensor:
        """Variance of x_{i-1} given x_i and x_0: the lower end of the learned range."""
        return self.betas * (1 - self.alphas_cumprod_prev) / (1 - self.alphas_cumprod)

    @cached_property
    def posterior_log_variance_clipped(self) -> Tensor:
        """Its logarithm; entry 0, which would be -inf, copies entry 1."""
        return torch.cat([self.posterior_variance[1:2], self.posterior_variance[1:]]).log()

    @cached_property
    def posterior_mean_coef1(self) -> Tensor:
        """Weight of x_0 in the mean of x_{i-1}."""
        return self.betas * self.alphas_cumprod_prev.sqrt() / (1 - self.alphas_cumprod)

    @cached_property
    def posterior_mean_coef2(self) -> Tensor:
        """Weight of x_i in the mean of x_{i-1}."""
        return (1 - self.alphas_cumprod_prev) * (1 - self.betas).sqrt() / (1 - self.alphas_cumprod)


@dataclass(frozen=True)
class ChainSteps:
    """Floats of each step k, in the order they are run (k = 0 is the noisiest).

    x' = ``keep``·x + ``noise``·eps + std·ε, with log std = ``mid`` + ``half``·v.
    """

    keep: list[float]
    noise: list[float]
    mid: list[float]
    half: list[float]

    @classmethod
    def ddpm(cls, schedule: NoiseSchedule) -> ChainSteps:
        """Ancestral sampling (DDPM, equation 7) with the learned variance."""
        level = schedule.alphas_cumprod
        c1 = schedule.posterior_mean_coef1
        low = schedule.posterior_log_variance_clipped
        high = schedule.betas.log()
        keep = c1 * level.rsqrt() + schedule.posterior_mean_coef2
        noise = -c1 * (1 / level - 1).sqrt()
        tables = (keep, noise, (high + low) / 4, (high - low) / 4)
        return cls(*(t.flip(0).tolist() for t in tables))

    @classmethod
    def ddim(cls, schedule: NoiseSchedule) -> ChainSteps:
        """DDIM (equation 12 with η = 0): no noise after the start."""
        level = schedule.alphas_cumprod
        after = schedule.alphas_cumprod_prev
        keep = (after / level).sqrt()
        noise = (1 - after).sqrt() - (after * (1 / level - 1)).sqrt()
        return cls(keep.flip(0).tolist(), noise.flip(0).tolist(), [], [])
