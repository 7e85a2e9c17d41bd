"""The loss of a diffusion head with a learned variance, on tokens noised at any step.

Sources: DDPM (arXiv 2006.11239, equation 7), improved DDPM (arXiv 2102.09672: the bound, equations
15-17), as MAR's release trains. Shape letters: N rows, C token width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specmm.image_ar.continuous.diffusion import NoiseSchedule

LOG_CLIP = 1e-12  # least probability of a bin in the bound's first term
HALF_BIN = 1 / 255  # of a value quantised to 8 bits in [-1, 1]


def _at(table: Tensor, i: Tensor, like: Tensor) -> Tensor:
    """``table`` at steps ``i`` [N], shaped and typed to multiply ``like`` [N, C]."""
    return table.to(like.device)[i].to(like.dtype)[:, None]


def noised(schedule: NoiseSchedule, clean: Tensor, i: Tensor, noise: Tensor) -> Tensor:
    """x_i [N, C] of ``clean`` tokens [N, C] at steps ``i`` [N]."""
    level = schedule.alphas_cumprod
    return _at(level.sqrt(), i, clean) * clean + _at((1 - level).sqrt(), i, clean) * noise


def denoised(schedule: NoiseSchedule, x: Tensor, i: Tensor, eps: Tensor) -> Tensor:
    """x_0 [N, C] that the noise ``eps`` in ``x`` at steps ``i`` [N] leaves."""
    level = schedule.alphas_cumprod
    return _at(level.rsqrt(), i, x) * x - _at((1 / level - 1).sqrt(), i, x) * eps


def log_variance(schedule: NoiseSchedule, v: Tensor, i: Tensor) -> Tensor:
    """log σ² [N, C] from the head's ``v``: from the posterior variance (-1) to beta (1)."""
    share = (v + 1) / 2
    high = _at(schedule.betas.log(), i, v)
    return share * high + (1 - share) * _at(schedule.posterior_log_variance_clipped, i, v)


def posterior_mean(schedule: NoiseSchedule, clean: Tensor, x: Tensor, i: Tensor) -> Tensor:
    """Mean [N, C] of x_{i-1} given x_0 and ``x`` = x_i (DDPM, equation 7)."""
    own = _at(schedule.posterior_mean_coef1, i, x) * clean
    return own + _at(schedule.posterior_mean_coef2, i, x) * x


def step_distribution(
    schedule: NoiseSchedule, out: Tensor, x: Tensor, i: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and log variance [N, C] of x_{i-1} by the head's ``out`` [N, 2C] at ``x`` [N, C]."""
    eps, v = out.chunk(2, dim=-1)
    mean = posterior_mean(schedule, denoised(schedule, x, i, eps), x, i)
    return mean, log_variance(schedule, v, i)


def diffusion_loss(
    schedule: NoiseSchedule, out: Tensor, clean: Tensor, x: Tensor, i: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared error of the noise and the bound [N] each (bits; it teaches the variance only).

    Their sum is MAR's loss (improved DDPM, equation 16 with weight 1).
    """
    eps, v = out.chunk(2, dim=-1)
    mse = (noise - eps).square().mean(-1)
    mean, log_var = step_distribution(schedule, torch.cat([eps.detach(), v], dim=-1), x, i)
    wanted = posterior_mean(schedule, clean, x, i)
    low = _at(schedule.posterior_log_variance_clipped, i, x)
    kl = _normal_kl(wanted, low, mean, log_var).mean(-1)
    first = -_bin_log_likelihood(clean, mean, 0.5 * log_var).mean(-1)
    return mse, torch.where(i == 0, first, kl) / math.log(2)


def _normal_kl(mean1: Tensor, log_var1: Tensor, mean2: Tensor, log_var2: Tensor) -> Tensor:
    difference = (mean1 - mean2).square() * torch.exp(-log_var2)
    return 0.5 * (log_var2 - log_var1 - 1 + torch.exp(log_var1 - log_var2) + difference)


def _bin_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log of a Gaussian's mass on the 8-bit bin around ``x``; the outer bins reach to infinity."""
    scale = torch.exp(-log_std)
    upper, lower = (_normal_cdf(scale * (x - mean + d)) for d in (HALF_BIN, -HALF_BIN))
    mass = torch.where(x > 0.999, 1 - lower, upper - lower)
    return torch.where(x < -0.999, upper, mass).clamp(min=LOG_CLIP).log()


def _normal_cdf(x: Tensor) -> Tensor:
    """The tanh approximation the release trains with."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
