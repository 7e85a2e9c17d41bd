"""MDLM's and BD3LM's network: a diffusion transformer over tokens with adaptive norms.

Official parameter names. MDLM has full attention; BD3LM is causal between blocks and has full
attention within a block. Sources: MDLM (arXiv 2406.07524), BD3LM (arXiv 2503.09573), DiT (arXiv
2212.09748).

Shape letters: B batch, L positions, H heads, D head width, C width, E width of the condition, v
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.diffusion_drafters.models.masked import check_mask, positions

WAVES = 256  # width of the sinusoidal embedding of the noise level


@dataclass(frozen=True)
class DDiTConfig:
    """Sizes; ``block`` 0 is MDLM, else BD3LM's block size.

    Raises ``ValueError`` when heads do not divide the width.
    """

    vocabulary: int
    width: int
    condition: int
    layers: int
    heads: int
    length: int
    block: int = 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"heads must divide the width into even parts, got {self.heads} and {self.width}"
            )


class DDiT(nn.Module):
    """The network; without time conditioning ``sigma`` is 0 throughout."""

    def __init__(self, config: DDiTConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = _Embedding(config.vocabulary, config.width)
        self.sigma_map = _NoiseLevel(config.condition)
        self.rotary_emb = _Rotary(config.width // config.heads)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.output_layer = _Output(config)

    def forward(
        self, tokens: Tensor, sigma: Tensor, mask: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """Logits [B, L, v] of ``tokens`` [B, L] at noise levels ``sigma`` [B]; see ``states``."""
        return self.output_layer(self.states(tokens, sigma, mask, order), self.sigma_map(sigma))

    def states(
        self, tokens: Tensor, sigma: Tensor, mask: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """States [B, L, C].

        ``mask`` [B or 1, 1, L or 1, L] bool is the attention mask (None: full attention), ``order``
        [B or 1, L] are positions.
        """
        if order is None:
            order = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.vocab_embed(tokens)
        condition = self.sigma_map(sigma)
        turns = self.rotary_emb(order)
        for block in self.blocks:
            x = block(x, condition, turns, mask)
        return x


class MaskedDDiT:
    """A :class:`DDiT` without time conditioning as :class:`DiffusionLM`, without shift.

    ``mask`` defaults to the last token. Raises ``ValueError`` for a mask that is not a token of the
    model, or that is its ``end``.
    """

    shift = 0

    def __init__(self, network: DDiT, mask: int | None = None, end: int | None = None) -> None:
        self.network = network.eval()
        self.end = end
        self.vocabulary = network.config.vocabulary
        self.room = network.config.length
        self.mask = check_mask(self.vocabulary - 1 if mask is None else mask, self.vocabulary, end)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.network.vocab_embed.embedding.device

    def to(self, device: torch.device) -> Self:
        """Move the weights to ``device``."""
        self.network.to(device)
        return self

    def states(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """States [B, L, C] of ``tokens`` [B, L]; see :class:`DiffusionLM`."""
        if valid is None:
            order = torch.arange(tokens.shape[1], device=tokens.device)[None]
            mask = None
        else:
            order = positions(valid)
            mask = valid[:, None, None]
        if size := self.network.config.block:  # its own block and earlier ones are seen
            block = order // size
            earlier = (block[:, :, None] >= block[:, None])[:, None]
            mask = earlier if mask is None else earlier & mask
        return self.network.states(tokens, self._no_noise(len(tokens)), mask, order)

    def head(self, states: Tensor) -> Tensor:
        """Logits [B, n, v] of ``states`` [B, n, C]."""
        condition = self.network.sigma_map(self._no_noise(len(states)))
        return self.network.output_layer(states, condition)

    def _no_noise(self, rows: int) -> Tensor:
        return torch.zeros(rows, device=self.device)


class _WeightNorm(nn.Module):
    """Layer norm with a weight and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:]).to(x.dtype) * self.weight


class _NoiseLevel(nn.Module):
    """Noise levels [B] as conditions [B, E]: waves of geometric frequencies, then a network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WAVES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma: Tensor) -> Tensor:
        half = WAVES // 2
        speeds = torch.exp(-math.log(10000) * torch.arange(half, device=sigma.device) / half)
        angle = sigma.float()[:, None] * speeds
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return F.silu(self.mlp(waves.to(next(self.parameters()).dtype)))


class _Rotary(nn.Module):
    """Positions [B or 1, L] as unit complex numbers [B or 1, L, 1, D / 2], of pairs (i, i + D / 2).

    Computed in float32, whatever the weights are.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, order: Tensor) -> Tensor:
        steps = torch.arange(0, self.head_dim, 2, device=order.device)
        angle = order[..., None].float() * 10000.0 ** (-steps / self.head_dim)
        return torch.polar(torch.ones_like(angle), angle)[:, :, None]


def _turn(x: Tensor, by: Tensor) -> Tensor:
    """``x`` [B, L, H, D], its halves real and imaginary parts, turned ``by`` the positions."""
    turned = torch.complex(*x.float().chunk(2, dim=-1)) * by
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


class _Block(nn.Module):
    """Attention and feed-forward, each shifted, scaled and gated by the condition."""

    def __init__(self, config: DDiTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = _WeightNorm(width)
        self.norm2 = _WeightNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.adaLN_modulation = nn.Linear(config.condition, 6 * width)

    def forward(self, x: Tensor, condition: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        """``x`` [B, L, C] under ``condition`` [B, E]; ``mask`` as in :meth:`DDiT.states`."""
        parts = self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1)
        shift, scale, gate, shift2, scale2, gate2 = parts
        x = x + gate * self._attend(self.norm1(x) * (1 + scale) + shift, turns, mask)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    def _attend(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.attn_qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B, L, H, D]
        q, k, v = (t.transpose(1, 2) for t in (_turn(q, turns), _turn(k, turns), v))
        attended = F.scaled_dot_product_attention(q, k, v, mask)
        return self.attn_out(attended.transpose(1, 2).flatten(2))


class _Embedding(nn.Module):
    """Token embeddings under the official name."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(vocabulary, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]


class _Output(nn.Module):
    """The last norm and the head: logits [B, L, v] of ``x`` [B, L, C]."""

    def __init__(self, config: DDiTConfig) -> None:
        super().__init__()
        self.norm_final = _WeightNorm(config.width)
        self.linear = nn.Linear(config.width, config.vocabulary)
        self.adaLN_modulation = nn.Linear(config.condition, 2 * config.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)
