"""The diffusion head of MAR: a residual MLP that predicts a token's noise, with the official
parameter names.

Source: MAR (arXiv 2406.11838, section 3.3 and appendix B). Shape letters: N rows, C token width, w
head width, Z width of the condition z, F modulations of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
FREQUENCIES = 256
PERIOD = 10_000.0


def sinusoid(t: Tensor, width: int = FREQUENCIES) -> Tensor:
    """Cosines, then sines, of original timesteps ``t`` [N] (0 … 999) at ``width``/2 frequencies:
    [N, width] float32.
    """
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


class FinalLayer(nn.Module):
    """A norm without parameters, shifted and scaled by the condition, and the output projection."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))


class SimpleMLPAdaLN(nn.Module):
    """Noisy tokens, timesteps and conditions to predicted noise and variance: [N, C] -> [N, 2C] =
    eps | v.
    """

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
        """The release's start: Xavier weights, and modulations and output at zero, so that blocks
        begin as identity.
        """
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
        return [
            m for m in (*self.res_blocks, self.final_layer) if isinstance(m, HeadBlock | FinalLayer)
        ]

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Predict for tokens ``x`` [N, C] at original timesteps ``t`` [N] under ``z`` [N, Z]."""
        y = F.silu(self.time_embed(t) + self.cond_embed(z))
        return Weights.of(self).predict(x, F.linear(y, *self.modulation()))

    def modulation(self) -> tuple[Tensor, Tensor]:
        """Weight [F, w] and bias [F] of all modulations at once, with 1 added to the bias where
        they scale.
        """
        layers = self._modulators()
        biases = [layer.bias.clone() for layer in layers]
        for bias in biases:
            bias[self.width : 2 * self.width] += 1
        return torch.cat([layer.weight for layer in layers]), torch.cat(biases)


@dataclass(frozen=True)
class Weights:
    """The weights a prediction needs, taken out of their modules: at one token a call, looking them
    up costs as much as the arithmetic.
    """

    width: int
    first: tuple[Tensor, Tensor]
    blocks: Sequence[
        tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    ]  # weight, bias of norm and both layers
    last: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, net: SimpleMLPAdaLN) -> Weights:
        """The weights of ``net``."""
        blocks = []
        for b in net.res_blocks:
            assert isinstance(b, HeadBlock)
            w1, w2 = _linears(b.mlp)
            blocks.append((b.in_ln.weight, b.in_ln.bias, w1.weight, w1.bias, w2.weight, w2.bias))
        last = net.final_layer.linear
        return cls(
            net.width,
            (net.input_proj.weight, net.input_proj.bias),
            blocks,
            (last.weight, last.bias),
        )

    def predict(self, x: Tensor, modulations: Tensor) -> Tensor:
        """Predictions [..., 2C] for tokens ``x`` [..., C] under ``modulations`` [..., F]; the two
        broadcast.

        F is, block by block, shift, scale (the release's 1 + scale) and gate, then shift and scale
        of the last layer.
        """
        parts, shape = modulations.split(self.width, dim=-1), (self.width,)
        h = F.linear(x, *self.first)
        for i, (norm, norm_bias, w1, b1, w2, b2) in enumerate(self.blocks):
            shift, scale, gate = parts[3 * i : 3 * i + 3]
            inner = torch.addcmul(shift, torch.layer_norm(h, shape, norm, norm_bias, EPS), scale)
            h = torch.addcmul(h, gate, F.linear(F.silu(F.linear(inner, w1, b1)), w2, b2))
        shift, scale = parts[-2:]
        return F.linear(
            torch.addcmul(shift, torch.layer_norm(h, shape, eps=EPS), scale), *self.last
        )


def _linears(layers: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in layers if isinstance(layer, nn.Linear)]


class DiffLoss(nn.Module):
    """The head under its official name, ``diffloss.net``."""

    def __init__(self, net: SimpleMLPAdaLN) -> None:
        super().__init__()
        self.net = net


def guide(out: Tensor, uncond: Tensor, scale: float | Tensor) -> Tensor:
    """Guided prediction [..., 2C]: eps = u + ``scale`` · (c - u); the variance stays the
    conditional one.
    """
    channels = out.shape[-1] // 2
    eps = uncond[..., :channels] + scale * (out[..., :channels] - uncond[..., :channels])
    return torch.cat([eps, out[..., channels:]], dim=-1)
