"""Gaussian diffusion of a token: the cosine schedule, respaced, and the loss of a head with a
learned variance.

Sources: DDPM (arXiv 2006.11239, equations 6-7), improved DDPM (arXiv 2102.09672: cosine schedule,
learned variance and the bound, equations 15-17), as MAR uses them. Tables are float64 and made
once; samplers take what they need of them to a device in one upload (``chain.py``). Shape letters:
S spaced steps, N rows, C token width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BASE_STEPS = 1000
MAX_BETA = 0.999
LOG_CLIP = 1e-12  # least probability of a bin in the bound's first term
HALF_BIN = 1 / 255  # of a value quantised to 8 bits in [-1, 1]


def cosine_betas(steps: int = BASE_STEPS) -> Tensor:
    """Betas [steps] of the cosine schedule, float64."""

    def level(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    return torch.tensor(
        [min(1 - level((i + 1) / steps) / level(i / steps), MAX_BETA) for i in range(steps)],
        dtype=torch.float64,
    )


def spaced_timesteps(spec: str, steps: int = BASE_STEPS) -> list[int]:
    """Original timesteps kept by ``spec``: "" (all), "100" (strided, both ends kept), "10,20" (by
    section), "ddim50".

    Raises ``ValueError`` for a spec that does not fit ``steps``.
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
    kept, first = [], 0
    for i, wanted in enumerate(sections):
        size = steps // len(sections) + (i < steps % len(sections))
        kept += [first + offset for offset in _strided(wanted, size)]
        first += size
    return sorted(set(kept))


def _even(wanted: int, steps: int) -> list[int]:
    for stride in range(1, steps + 1):
        if len(range(0, steps, stride)) == wanted:
            return list(range(0, steps, stride))
    raise ValueError(
        f"'ddim' must be followed by a number that strides {steps} steps evenly, got {wanted}"
    )


def _strided(wanted: int, size: int) -> list[int]:
    if wanted > size:
        raise ValueError(f"head steps must be at most {size} in each section, got {wanted}")
    stride = 1.0 if wanted == 1 else (size - 1) / (wanted - 1)
    offsets, at = [], 0.0
    for _ in range(wanted):
        offsets.append(round(at))
        at += stride  # summed, not multiplied: the release's rounding
    return offsets


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tables [S] of a respaced schedule, indexed by the spaced step i (0 is the cleanest), float64."""

    timestep_map: Tensor  # original timesteps, int64
    alphas_cumprod: Tensor

    @classmethod
    def of(cls, spec: str = "100") -> Schedule:
        """The cosine schedule respaced by ``spec`` (``spaced_timesteps``)."""
        kept = torch.tensor(spaced_timesteps(spec))
        return cls(kept, (1 - cosine_betas()).cumprod(0)[kept])

    def __len__(self) -> int:
        """S."""
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

    def at(self, table: Tensor, i: Tensor, like: Tensor) -> Tensor:
        """``table`` at steps ``i`` [N], shaped and typed to multiply ``like`` [N, C]."""
        return table.to(like.device)[i].to(like.dtype)[:, None]

    def x_start(self, x: Tensor, i: Tensor, eps: Tensor) -> Tensor:
        """x_0 [N, C] that the noise ``eps`` in ``x`` at steps ``i`` [N] leaves."""
        level = self.alphas_cumprod
        return self.at(level.rsqrt(), i, x) * x - self.at((1 / level - 1).sqrt(), i, x) * eps

    def posterior_mean(self, x_start: Tensor, x: Tensor, i: Tensor) -> Tensor:
        """Mean [N, C] of x_{i-1} given x_0 and ``x`` = x_i (DDPM, equation 7)."""
        return (
            self.at(self.posterior_mean_coef1, i, x) * x_start
            + self.at(self.posterior_mean_coef2, i, x) * x
        )

    def log_variance(self, v: Tensor, i: Tensor) -> Tensor:
        """log σ² [N, C] from the head's ``v``, which interpolates between posterior variance (-1)
        and beta (1).
        """
        low, high = self.posterior_log_variance_clipped, self.betas.log()
        share = (v + 1) / 2
        return share * self.at(high, i, v) + (1 - share) * self.at(low, i, v)

    def probs(self, out: Tensor, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance [N, C] of x_{i-1} by the head's ``out`` [N, 2C] at ``x`` [N, C],
        steps ``i`` [N].
        """
        eps, v = out.chunk(2, dim=-1)
        return self.posterior_mean(self.x_start(x, i, eps), x, i), self.log_variance(v, i)

    def noised(self, x_start: Tensor, i: Tensor, noise: Tensor) -> Tensor:
        """x_i [N, C] of clean tokens."""
        level = self.alphas_cumprod
        return (
            self.at(level.sqrt(), i, x_start) * x_start
            + self.at((1 - level).sqrt(), i, x_start) * noise
        )

    def loss(
        self, out: Tensor, x_start: Tensor, x: Tensor, i: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Squared error of the noise and the bound [N] each (bits, which teaches the variance
        only).

        Their sum is MAR's loss (improved DDPM, equation 16 with weight 1).
        """
        eps, v = out.chunk(2, dim=-1)
        mse = (noise - eps).square().mean(-1)
        mean, log_var = self.probs(torch.cat([eps.detach(), v], dim=-1), x, i)
        wanted = self.posterior_mean(x_start, x, i)
        kl = _normal_kl(
            wanted, self.at(self.posterior_log_variance_clipped, i, x), mean, log_var
        ).mean(-1)
        first = -_bin_log_likelihood(x_start, mean, 0.5 * log_var).mean(-1)
        return mse, torch.where(i == 0, first, kl) / math.log(2)


def _normal_kl(mean1: Tensor, log_var1: Tensor, mean2: Tensor, log_var2: Tensor) -> Tensor:
    difference = (mean1 - mean2).square() * torch.exp(-log_var2)
    return 0.5 * (log_var2 - log_var1 - 1 + torch.exp(log_var1 - log_var2) + difference)


def _bin_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log of the mass that a Gaussian puts on the 8-bit bin around ``x``; the outer bins reach to
    infinity.
    """
    scale = torch.exp(-log_std)
    upper, lower = (_normal_cdf(scale * (x - mean + d)) for d in (HALF_BIN, -HALF_BIN))
    mass = torch.where(x > 0.999, 1 - lower, upper - lower)
    return torch.where(x < -0.999, upper, mass).clamp(min=LOG_CLIP).log()


def _normal_cdf(x: Tensor) -> Tensor:
    """The tanh approximation the release trains with."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
