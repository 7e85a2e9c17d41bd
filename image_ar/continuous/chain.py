"""The diffusion head as samplers use it: one denoising chain a token, run step by step.

Modulations (adaLN) of all steps are made in one product, since they depend on the step and the
token's condition only; under guidance the two branches share x. Shape letters: R rows (tokens), S
steps, W steps of a window, G branches (1, or 2 with guidance: conditional, unconditional), C token
width, w head width, F modulations of a step. Steps are counted as they are run: k = 0 is the
noisiest, k = S-1 the last, which adds no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.image_ar.continuous.diffusion import Schedule
from specmm.image_ar.continuous.head import SimpleMLPAdaLN, Weights

TABLE_LIMIT = 2**24  # modulations kept at a time (64 MiB); beyond, they are made call by call


@dataclass
class Condition:
    """What the head is asked under: z [R, G, Z] and the guidance ``scale`` of this iteration
    (unused when G = 1).
    """

    z: Tensor
    scale: float | Tensor = 1.0


class ChainHead:
    """A head under a respaced schedule; ``bind`` it to the tokens of an iteration."""

    def __init__(self, net: SimpleMLPAdaLN, schedule: Schedule) -> None:
        self.net, self.schedule = net, schedule
        self.device, self.dtype = net.input_proj.weight.device, net.input_proj.weight.dtype
        self.weight, self.bias = net.modulation()  # [F, w], [F]
        self.times = net.time_embed(schedule.timestep_map.flip(0).to(self.device))  # [S, w]
        self.channels, self.weights = net.input_proj.in_features, Weights.of(net)

    def bind(self, condition: Condition) -> BoundHead:
        """The head for the tokens of ``condition``."""
        return BoundHead(self, condition)


class BoundHead:
    """A head bound to R tokens' conditions: predictions at any step, guided."""

    def __init__(self, head: ChainHead, condition: Condition) -> None:
        self.head, self.scale = head, condition.scale
        self.cond = head.net.cond_embed(condition.z.to(head.dtype))  # [R, G, w]
        self.guided = self.cond.shape[1] == 2
        size = len(head.times) * self.cond.shape[0] * self.cond.shape[1] * len(head.bias)
        self.table: Tensor | None = (
            self._modulate(head.times[:, None, None]) if size <= TABLE_LIMIT else None
        )

    def __len__(self) -> int:
        """R."""
        return len(self.cond)

    def keep(self, rows: Tensor) -> None:
        """Go on with some ``rows`` [R'] only."""
        self.cond = self.cond[rows]
        self.table = None if self.table is None else self.table[:, rows]

    def at(self, k: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Guided noise and variance (eps, v) [R, C] of tokens ``x`` [R, C] at step ``k``, float32."""
        made = (
            self._modulate(self.head.times[k]) if self.table is None else self.table[k]
        )  # [R, G, F]
        return self._predict(x, made)

    def window(self, first: list[int], x: Tensor) -> tuple[Tensor, Tensor]:
        """(eps, v) [R, W, C] of tokens ``x`` [R, W, C]: row r at steps first[r], first[r] + 1, …
        (S-1 stays).
        """
        width = x.shape[1]
        if self.table is not None and len(first) == 1 and first[0] + width <= len(self.head.times):
            return self._predict(x, self.table[first[0] : first[0] + width].transpose(0, 1))
        starts = torch.tensor(first, device=x.device)[:, None]
        steps = (starts + torch.arange(width, device=x.device)).clamp_(max=len(self.head.times) - 1)
        if self.table is not None:
            return self._predict(
                x, self.table[steps, torch.arange(len(x), device=x.device)[:, None]]
            )
        inner = F.silu(self.head.times[steps][:, :, None] + self.cond[:, None])
        return self._predict(x, F.linear(inner, self.head.weight, self.head.bias))

    def _modulate(self, times: Tensor) -> Tensor:
        return F.linear(F.silu(times + self.cond), self.head.weight, self.head.bias)

    def _predict(self, x: Tensor, modulations: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head.weights.predict(
            x[..., None, :].to(self.head.dtype), modulations
        ).float()  # [..., G, 2C]
        eps, v = out[..., 0, : self.head.channels], out[..., 0, self.head.channels :]
        if self.guided:
            eps = torch.lerp(out[..., 1, : self.head.channels], eps, self.scale)
        return eps, v


@dataclass(frozen=True)
class Steps:
    """Floats of each step k: x' = ``keep``·x + ``noise``·eps + std·ε, with log std = ``mid`` +
    ``half``·v.
    """

    keep: list[float]
    noise: list[float]
    mid: list[float]
    half: list[float]

    @classmethod
    def ddpm(cls, schedule: Schedule) -> Steps:
        """Ancestral sampling (DDPM, equation 7) with the learned variance."""
        level, c1, c2 = (
            schedule.alphas_cumprod,
            schedule.posterior_mean_coef1,
            schedule.posterior_mean_coef2,
        )
        low, high = schedule.posterior_log_variance_clipped, schedule.betas.log()
        tables = (
            c1 * level.rsqrt() + c2,
            -c1 * (1 / level - 1).sqrt(),
            (high + low) / 4,
            (high - low) / 4,
        )
        return cls(*(t.flip(0).tolist() for t in tables))

    @classmethod
    def ddim(cls, schedule: Schedule) -> Steps:
        """DDIM (arXiv 2010.02502, equation 12 with η = 0): no noise after the start."""
        level, after = schedule.alphas_cumprod, schedule.alphas_cumprod_prev
        tables = ((after / level).sqrt(), (1 - after).sqrt() - (after * (1 / level - 1)).sqrt())
        keep, noise = (t.flip(0).tolist() for t in tables)
        return cls(keep, noise, [], [])


def ancestral(
    bound: BoundHead,
    steps: Steps,
    noise: Tensor,
    temperature: float = 1.0,
    trace: list[Tensor] | None = None,
) -> Tensor:
    """Tokens [R, C] by DDPM from ``noise`` [S + 1, R, C]: the start, then one for each step but the
    last.

    ``temperature`` multiplies the standard deviation of every step. ``trace`` is given the steps'
    log standard deviations [R, C] at temperature 1, the last step's among them.
    """
    x, last = noise[0], len(steps.keep) - 1
    noise = noise if temperature == 1.0 else noise * temperature
    for k in range(last + 1):
        eps, v = bound.at(k, x)
        x = torch.add(x * steps.keep[k], eps, alpha=steps.noise[k])
        if k < last or trace is not None:
            log_std = (v * steps.half[k]).add_(steps.mid[k])
            if trace is not None:
                trace.append(log_std)
            if k < last:
                x = torch.addcmul(x, log_std.exp(), noise[k + 1])
    return finite(x)


def deterministic(bound: BoundHead, steps: Steps, start: Tensor) -> Tensor:
    """Tokens [R, C] by DDIM from the noise ``start`` [R, C]."""
    x = start
    for k, keep in enumerate(steps.keep):
        eps, _ = bound.at(k, x)
        x = torch.add(x * keep, eps, alpha=steps.noise[k])
    return finite(x)


def finite(tokens: Tensor) -> Tensor:
    """``tokens``; raises ``ValueError`` when a chain has left the finite numbers."""
    if not bool(tokens.isfinite().all()):
        raise ValueError(
            "denoising chain must stay finite, got NaN or infinity: the head's weights, its dtype or cfg do not suit it"
        )
    return tokens
