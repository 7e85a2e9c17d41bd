"""MAR's diffusion head, a residual MLP that predicts a token's noise, and its denoising chain.

The modules have the official parameter names. For sampling, one product computes the modulations
(adaLN) of all steps, since they depend only on the step and the token's condition; under guidance
the two branches share x. Source: MAR (arXiv 2406.11838, section 3.3 and appendix B).
Shape letters: N rows, R rows (tokens) of a chain, S steps, W steps of a window, G branches (1, or 2
with guidance: conditional, unconditional), C token width, w head width, Z width of the condition z,
F modulations of a row. Steps are numbered in the order they run: k = 0 is the noisiest; k = S-1,
the last, adds no noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.loading.hardware import PackedLinear

EPS = 1e-6
FREQUENCIES = 256
PERIOD = 10_000.0
TABLE_LIMIT = 2**24  # modulations kept at a time (64 MiB); beyond, they are made call by call
GPU_LIMIT = 2**27  # on a GPU, which reads them faster than it makes them


def sinusoid(t: Tensor, width: int = FREQUENCIES) -> Tensor:
    """Cosines, then sines, of original timesteps ``t`` [N] (0 … 999): [N, width] float32."""
    half = width // 2
    places = torch.arange(half, device=t.device, dtype=torch.float32)
    rates = torch.exp(-math.log(PERIOD) * places / half)
    angles = t[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _mlp(inner: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, width), nn.SiLU(), nn.Linear(width, width))


def _linear(layers: nn.Sequential, i: int) -> nn.Linear:
    return cast(nn.Linear, layers[i])


class TimeEmbed(nn.Module):
    """Timesteps [N] -> [N, w]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = _mlp(FREQUENCIES, width)

    def forward(self, t: Tensor) -> Tensor:
        """Embed the timesteps."""
        return self.mlp(sinusoid(t).to(_linear(self.mlp, 0).weight.dtype))


class HeadBlock(nn.Module):
    """A residual MLP; its norm is shifted and scaled, its output gated, by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPS)
        self.mlp = _mlp(width, width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))


class FinalLayer(nn.Module):
    """A norm without parameters, shifted and scaled by the condition, and the output projection."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))


class SimpleMLPAdaLN(nn.Module):
    """Noisy tokens, timesteps and conditions to noise and variance: [N, C] -> [N, 2C] = eps | v."""

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
        """Xavier weights, and modulations and output at zero, so that blocks start as identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for i in (0, 2):
            nn.init.normal_(_linear(self.time_embed.mlp, i).weight, std=0.02)
        for layer in (*self._modulators(), self.final_layer.linear):
            nn.init.zeros_(layer.weight)

    def _modulators(self) -> list[nn.Linear]:
        blocks = cast(Iterable[HeadBlock], self.res_blocks)
        modulators = [_linear(block.adaLN_modulation, 1) for block in blocks]
        return [*modulators, _linear(self.final_layer.adaLN_modulation, 1)]

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Predict for tokens ``x`` [N, C] at original timesteps ``t`` [N] under ``z`` [N, Z]."""
        y = F.silu(self.time_embed(t) + self.cond_embed(z))
        return HeadWeights.of(self).predict(x, F.linear(y, *self.modulation()))

    def modulation(self) -> tuple[Tensor, Tensor]:
        """Weight [F, w] and bias [F] of all modulations, with 1 added to the biases of scales."""
        layers = self._modulators()
        biases = [layer.bias.clone() for layer in layers]
        for bias in biases:
            bias[self.width : 2 * self.width] += 1
        return torch.cat([layer.weight for layer in layers]), torch.cat(biases)


# of layers that do nothing beside what :class:`HeadWeights` computes
FORWARDS = {
    kind.forward
    for kind in (nn.Linear, PackedLinear, nn.LayerNorm, nn.SiLU, nn.Sequential, nn.ModuleList)
} | {TimeEmbed.forward, SimpleMLPAdaLN.forward}


def check_plain(net: SimpleMLPAdaLN) -> None:
    """Raise ``ValueError`` for adapters, hooks and replaced forwards in ``net``: its chains
    multiply by the layers' weights directly and would skip them.
    """
    for name, module in net.named_modules():
        if name.partition(".")[0] == "cond_embed":  # it is called
            continue
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks or "forward" in vars(module) or type(module).forward not in FORWARDS:
            raise ValueError(
                "the denoising head must have plain layers, got a hook, an adapter or a replaced "
                f"forward at {name or 'the head'}: merge it into the weights, or remove it"
            )


class DiffLoss(nn.Module):
    """The head under its official name, ``diffloss.net``."""

    def __init__(self, net: SimpleMLPAdaLN) -> None:
        super().__init__()
        self.net = net


@dataclass(frozen=True)
class HeadWeights:
    """The head's weights as plain tensors, outside their modules.

    At one token a call, looking them up costs as much as the arithmetic.
    """

    width: int
    first: tuple[Tensor, Tensor]
    # weight and bias of norm and both layers
    blocks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]
    last: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, net: SimpleMLPAdaLN) -> HeadWeights:
        """The weights of ``net``."""
        blocks = []
        for block in cast(Iterable[HeadBlock], net.res_blocks):
            norm = block.in_ln
            inner = _linear(block.mlp, 0)
            outer = _linear(block.mlp, 2)
            blocks.append(
                (norm.weight, norm.bias, inner.weight, inner.bias, outer.weight, outer.bias)
            )
        first = (net.input_proj.weight, net.input_proj.bias)
        last = (net.final_layer.linear.weight, net.final_layer.linear.bias)
        return cls(net.width, first, blocks, last)

    def predict(self, x: Tensor, modulations: Tensor) -> Tensor:
        """Predictions [..., 2C] for ``x`` [..., C] under ``modulations`` [..., F]; both broadcast.

        F is, block by block, shift, scale (the release's 1 + scale) and gate, then shift and scale
        of the last layer.
        """
        parts = modulations.split(self.width, dim=-1)
        shape = (self.width,)
        linear = _linear_of(x)
        h = linear(x, *self.first)
        for i, (norm, norm_bias, w1, b1, w2, b2) in enumerate(self.blocks):
            shift, scale, gate = parts[3 * i : 3 * i + 3]
            inner = torch.addcmul(shift, torch.layer_norm(h, shape, norm, norm_bias, EPS), scale)
            h = torch.addcmul(h, gate, linear(F.silu(linear(inner, w1, b1)), w2, b2))
        shift, scale = parts[-2:]
        h = torch.addcmul(shift, torch.layer_norm(h, shape, eps=EPS), scale)
        return linear(h, *self.last)


def _linear_of(x: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function that applies a linear layer to ``x``. In a CPU program, for one row, calling a
    library would take longer than the product itself.
    """
    single = torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel() == x.shape[-1]
    return _one_row if single else F.linear


def _one_row(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``F.linear`` written as a sum, which the compiler can fuse into the program."""
    return (x.unsqueeze(-2) * weight).sum(-1) + bias


@dataclass
class HeadCondition:
    """z [R, G, Z], and the guidance ``scale`` of this iteration (unused when G = 1)."""

    z: Tensor
    scale: float | Tensor = 1.0


class ChainHead:
    """A head under a respaced schedule; ``bind`` it to the tokens of an iteration."""

    def __init__(self, net: SimpleMLPAdaLN, schedule: NoiseSchedule) -> None:
        self.net = net
        self.schedule = schedule
        self.device = net.input_proj.weight.device
        self.dtype = net.input_proj.weight.dtype
        self.weight, self.bias = net.modulation()  # [F, w], [F]
        self.times = net.time_embed(schedule.timestep_map.flip(0).to(self.device))  # [S, w]
        self.channels = net.input_proj.in_features
        self.weights = HeadWeights.of(net)

    def bind(self, condition: HeadCondition) -> BoundHead:
        """The head for the tokens of ``condition``."""
        z = condition.z.to(self.dtype)
        return BoundHead(self, self.net.cond_embed(z), condition.scale)

    def keeps(self, rows: int, branches: int) -> bool:
        """Whether the modulations of all steps of ``rows`` are stored."""
        limit = GPU_LIMIT if self.device.type == "cuda" else TABLE_LIMIT
        return len(self.times) * rows * branches * len(self.bias) <= limit


class BoundHead:
    """A head bound to R tokens' embedded conditions ``cond`` [R, G, w]: predictions at any step,
    guided by ``scale``.
    """

    def __init__(self, head: ChainHead, cond: Tensor, scale: float | Tensor) -> None:
        self.head = head
        self.cond = cond
        self.scale = scale

    @cached_property
    def table(self) -> Tensor | None:
        """The modulations of all steps [S, R, G, F], if they are stored."""
        if not self.head.keeps(*self.cond.shape[:2]):
            return None
        return self._modulate(self.head.times[:, None, None])

    def __len__(self) -> int:
        return len(self.cond)

    def at(self, k: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Guided noise and variance (eps, v) [R, C] of ``x`` [R, C] at step ``k``, float32."""
        modulations = self._modulate(self.head.times[k]) if self.table is None else self.table[k]
        return self._predict(x, modulations)

    def window(self, rows: list[int], first: list[int], x: Tensor) -> tuple[Tensor, Tensor]:
        """(eps, v) [N, W, C] of ``x`` [N, W, C] for N of the rows: row rows[n] at W steps from step
        first[n] on (steps beyond S-1 count as S-1).
        """
        width = x.shape[1]
        last = len(self.head.times) - 1
        if self.table is not None and len(rows) == 1 and first[0] + width <= last + 1:
            modulations = self.table[first[0] : first[0] + width, rows[0]]
            return self._predict(x, modulations[None])
        starts = torch.tensor(first, device=x.device)[:, None]
        steps = (starts + torch.arange(width, device=x.device)).clamp_(max=last)
        if self.table is not None:
            row_index = torch.tensor(rows, device=x.device)[:, None]
            return self._predict(x, self.table[steps, row_index])
        inner = F.silu(self.head.times[steps][:, :, None] + self.cond[rows][:, None])
        return self._predict(x, F.linear(inner, self.head.weight, self.head.bias))

    def _modulate(self, times: Tensor) -> Tensor:
        return F.linear(F.silu(times + self.cond), self.head.weight, self.head.bias)

    def _predict(self, x: Tensor, modulations: Tensor) -> tuple[Tensor, Tensor]:
        """Guided predictions for ``x`` [..., C] under ``modulations`` [..., G, F]."""
        return guided(self.head.weights, x, modulations, self.scale)


def guided(
    weights: HeadWeights, x: Tensor, modulations: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Predicted noise and variance (eps, v) [..., C] of ``x`` [..., C] under ``modulations`` [...,
    G, F], float32; the noise is guided by ``scale`` if G = 2.
    """
    channels = x.shape[-1]
    x = x.to(weights.first[0].dtype)
    if modulations.shape[-2] == 2:
        with_class, without = weights.predict(x.unsqueeze(-2), modulations).float().unbind(-2)
        eps, v = with_class.chunk(2, dim=-1)
        return torch.lerp(without[..., :channels], eps, scale), v
    # products take two dimensions directly, and fold others at every call
    predicted = weights.predict(x.flatten(0, -2), modulations.flatten(0, -2)).float()
    eps, v = predicted.view(*x.shape[:-1], -1).chunk(2, dim=-1)
    return eps, v


def ancestral(
    bound: BoundHead,
    steps: ChainSteps,
    noise: Tensor,
    temperature: float = 1.0,
    trace: list[Tensor] | None = None,
) -> Tensor:
    """Tokens [R, C] by DDPM from ``noise`` [S + 1, R, C]: the start, then one for each step.

    The last step uses none. ``temperature`` multiplies the standard deviation of every step.
    ``trace`` receives the log standard deviations [R, C] of all steps at temperature 1, including
    the last.
    """
    x = noise[0]
    last = len(steps.keep) - 1
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
    return x


def deterministic(bound: BoundHead, steps: ChainSteps, start: Tensor) -> Tensor:
    """Tokens [R, C] by DDIM from the noise ``start`` [R, C]."""
    x = start
    for k, keep in enumerate(steps.keep):
        eps, _ = bound.at(k, x)
        x = torch.add(x * keep, eps, alpha=steps.noise[k])
    return x


def finite(tokens: Tensor) -> Tensor:
    """``tokens``; raises ``ValueError`` when a chain has left the finite numbers."""
    if not bool(tokens.isfinite().all()):
        raise ValueError(
            "denoising chain must stay finite, got NaN or infinity: "
            "the head's weights, its dtype or cfg do not suit it"
        )
    return tokens
