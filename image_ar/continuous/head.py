"""The diffusion head of MAR: a residual MLP that predicts a token's noise, with the official parameter names.

Source: MAR (arXiv 2406.11838, section 3.3 and appendix B). Shape letters: N rows, C token width, w head width, Z width
of the condition z, F width of the sinusoid.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
FREQUENCIES = 256  # F
PERIOD = 10_000.0


def sinusoid(t: Tensor, width: int = FREQUENCIES) -> Tensor:
    """Cosines, then sines, of original timesteps ``t`` [N] (0 … 999) at ``width``/2 frequencies: [N, F] float32."""
    half = width // 2
    rates = torch.exp(-math.log(PERIOD) * torch.arange(half, device=t.device) / half)
    angles = t[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimeEmbed(nn.Module):
    """Timesteps [N] -> [N, w]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Embed the timesteps."""
        return self.mlp(sinusoid(t).to(_linears(self.mlp)[0].weight.dtype))


class HeadBlock(nn.Module):
    """A residual MLP whose norm is shifted and scaled, and whose output is gated, by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, h: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """[..., w] -> [..., w]; ``scale`` multiplies the norm as it is (the release's 1 + scale)."""
        inner = torch.addcmul(shift, self.in_ln(h), scale)
        return torch.addcmul(h, gate, self.mlp(inner))


class FinalLayer(nn.Module):
    """A norm without parameters, shifted and scaled by the condition, and the output projection."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """[..., w] -> [..., out]; ``scale`` as in ``HeadBlock``."""
        return self.linear(torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=EPS), scale))


class SimpleMLPAdaLN(nn.Module):
    """Noisy tokens, timesteps and conditions to predicted noise and variance: [N, C] -> [N, 2C] = eps | v."""

    def __init__(self, channels: int, width: int, cond: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.time_embed = TimeEmbed(width)
        self.cond_embed = nn.Linear(cond, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(HeadBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, 2 * channels)
        self._initialise()

    def _initialise(self) -> None:
        """The release's start: Xavier weights, and modulations and output at zero, so that blocks begin as identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for layer in _linears(self.time_embed.mlp):
            nn.init.normal_(layer.weight, std=0.02)
        for layer in (*self._modulators(), self.final_layer.linear):
            nn.init.zeros_(layer.weight)

    def _modulators(self) -> list[nn.Linear]:
        return [_linears(b.adaLN_modulation)[0] for b in self._modulated()]

    def _modulated(self) -> list[HeadBlock | FinalLayer]:
        return [m for m in (*self.res_blocks, self.final_layer) if isinstance(m, HeadBlock | FinalLayer)]

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Predict for tokens ``x`` [N, C] at original timesteps ``t`` [N] under ``z`` [N, Z]."""
        y = F.silu(self.time_embed(t) + self.cond_embed(z))
        return self.run(x, F.linear(y, *self.modulation()))

    def modulation(self) -> tuple[Tensor, Tensor]:
        """Weight [3w·depth + 2w, w] and bias of all modulations at once, with 1 added where they scale."""
        layers = self._modulators()
        biases = [layer.bias.clone() for layer in layers]
        for bias in biases:
            bias[self.width : 2 * self.width] += 1
        return torch.cat([layer.weight for layer in layers]), torch.cat(biases)

    def run(self, x: Tensor, modulations: Tensor) -> Tensor:
        """Predict [..., 2C] for tokens ``x`` [..., C] under ``modulations`` [..., 3w·depth + 2w]; they broadcast."""
        parts = modulations.split(self.width, dim=-1)
        h = self.input_proj(x)
        for i, block in enumerate(self.res_blocks):
            h = block(h, *parts[3 * i : 3 * i + 3])
        return self.final_layer(h, *parts[-2:])


def _linears(layers: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in layers if isinstance(layer, nn.Linear)]


class DiffLoss(nn.Module):
    """The head under its official name, ``diffloss.net``."""

    def __init__(self, net: SimpleMLPAdaLN) -> None:
        super().__init__()
        self.net = net


def guide(out: Tensor, uncond: Tensor, scale: float | Tensor) -> Tensor:
    """Guided prediction [..., 2C]: eps = u + ``scale`` · (c - u); the variance stays the conditional one."""
    channels = out.shape[-1] // 2
    eps = uncond[..., :channels] + scale * (out[..., :channels] - uncond[..., :channels])
    return torch.cat([eps, out[..., channels:]], dim=-1)
