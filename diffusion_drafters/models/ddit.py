"""MDLM's and BD3LM's network: a diffusion transformer over tokens, the noise level entering through
adaptive norms.

Official parameter names. MDLM sees everything; BD3LM is causal between blocks and sees everything
within one, and is trained on [noisy | clean] copies of a text. Sources: MDLM (arXiv 2406.07524;
SUBS is its section 3.2), BD3LM (arXiv 2503.09573), DiT (arXiv 2212.09748).

Shape letters: B batch, L positions, H heads, D head width, C width, E width of the condition, v
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.diffusion_drafters.models.masked import check_mask, places

WAVES = 256  # width of the sinusoidal embedding of the noise level
NEVER = -1e6  # the log-probability SUBS gives what cannot be


@dataclass(frozen=True)
class DDiTConfig:
    """Sizes; ``block`` 0 is MDLM, else BD3LM's block size. Raises ``ValueError`` when heads do not
    divide the width.
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


class WeightNorm(nn.Module):
    """Layer norm with a weight and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., C]."""
        return F.layer_norm(x.float(), x.shape[-1:]).to(x.dtype) * self.weight


class NoiseLevel(nn.Module):
    """Noise levels [B] as conditions [B, E]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WAVES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma: Tensor) -> Tensor:
        """Cosines and sines of ``sigma`` at geometric frequencies, then the network."""
        half = WAVES // 2
        speeds = torch.exp(-math.log(10000) * torch.arange(half, device=sigma.device) / half)
        angle = sigma.float()[:, None] * speeds
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return F.silu(self.mlp(waves.to(next(self.parameters()).dtype)))


class Rotary(nn.Module):
    """Rotations of pairs (i, i + D / 2) by the position."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, positions: Tensor) -> Tensor:
        """Unit complex numbers [B or 1, L, 1, D / 2] of ``positions`` [B or 1, L]."""
        speeds = 10000.0 ** (
            -torch.arange(0, self.head_dim, 2, device=positions.device) / self.head_dim
        )
        angle = positions[..., None].float() * speeds  # always float32, whatever the weights are
        return torch.polar(torch.ones_like(angle), angle)[:, :, None]


def turn(x: Tensor, by: Tensor) -> Tensor:
    """``x`` [B, L, H, D] with its halves taken as real and imaginary parts and turned ``by`` [B or
    1, L, 1, D / 2].
    """
    turned = torch.complex(*x.float().chunk(2, dim=-1)) * by
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and feed-forward, each shifted, scaled and gated by the condition."""

    def __init__(self, config: DDiTConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm1, self.norm2 = WeightNorm(width), WeightNorm(width)
        self.attn_qkv, self.attn_out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.adaLN_modulation = nn.Linear(config.condition, 6 * width)

    def forward(self, x: Tensor, condition: Tensor, turns: Tensor, seen: Tensor | None) -> Tensor:
        """``x`` [B, L, C] under ``condition`` [B, E]; ``seen`` broadcasts to [B, H, L, L] bool,
        None is everything.
        """
        shift, scale, gate, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(
            6, dim=-1
        )
        x = x + gate * self.attend(self.norm1(x) * (1 + scale) + shift, turns, seen)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    def attend(self, x: Tensor, turns: Tensor, seen: Tensor | None) -> Tensor:
        """Self-attention of ``x`` [B, L, C]."""
        q, k, v = self.attn_qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B, L, H, D]
        q, k, v = (t.transpose(1, 2) for t in (turn(q, turns), turn(k, turns), v))
        return self.attn_out(
            F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        )


class Embedding(nn.Module):
    """Token embeddings under the official name."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(vocabulary, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., C]."""
        return self.embedding[tokens]


class Output(nn.Module):
    """The last norm and the head."""

    def __init__(self, config: DDiTConfig) -> None:
        super().__init__()
        self.norm_final, self.linear = (
            WeightNorm(config.width),
            nn.Linear(config.width, config.vocabulary),
        )
        self.adaLN_modulation = nn.Linear(config.condition, 2 * config.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Logits [B, L, v] of ``x`` [B, L, C]."""
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class DDiT(nn.Module):
    """The network; without time conditioning ``sigma`` is 0 throughout."""

    def __init__(self, config: DDiTConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = Embedding(config.vocabulary, config.width)
        self.sigma_map = NoiseLevel(config.condition)
        self.rotary_emb = Rotary(config.width // config.heads)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_layer = Output(config)

    def forward(
        self, tokens: Tensor, sigma: Tensor, seen: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """Logits [B, L, v] of ``tokens`` [B, L] at noise levels ``sigma`` [B]; see ``states`` for
        the others.
        """
        return self.output_layer(self.states(tokens, sigma, seen, order), self.sigma_map(sigma))

    def states(
        self, tokens: Tensor, sigma: Tensor, seen: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """States [B, L, C]; ``seen`` [B or 1, 1, L or 1, L] bool opens keys, ``order`` [B or 1, L]
        are positions.
        """
        order = (
            torch.arange(tokens.shape[1], device=tokens.device)[None] if order is None else order
        )
        x, condition, turns = (
            self.vocab_embed(tokens),
            self.sigma_map(sigma),
            self.rotary_emb(order),
        )
        for block in self.blocks:
            x = block(x, condition, turns, seen)
        return x


class MaskedDDiT:
    """A :class:`DDiT` without time conditioning as :class:`DiffusionLM`: no shift, its mask the
    last token, or another.

    Raises ``ValueError`` for a mask that is no token of the model and for one that ends a text.
    """

    shift = 0

    def __init__(self, network: DDiT, mask: int | None = None, end: int | None = None) -> None:
        self.network, self.end = network.eval(), end
        self.vocabulary, self.room = network.config.vocabulary, network.config.length
        self.mask = check_mask(self.vocabulary - 1 if mask is None else mask, self.vocabulary, end)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.network.vocab_embed.embedding.device

    def states(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """States [B, L, C] of ``tokens`` [B, L]; nobody attends where ``valid`` [B, L] bool is
        false.
        """
        seen = None if valid is None else valid[:, None, None]
        if self.network.config.block:
            order = (
                torch.arange(tokens.shape[1], device=tokens.device)[None]
                if valid is None
                else places(valid)
            )
            blocks = block_causal(order, self.network.config.block)[:, None]
            seen = blocks if seen is None else blocks & seen
        return self.network.states(
            tokens, self._silence(len(tokens)), seen, None if valid is None else places(valid)
        )

    def head(self, states: Tensor) -> Tensor:
        """Logits [B, n, v] of ``states`` [B, n, C]."""
        return self.network.output_layer(states, self.network.sigma_map(self._silence(len(states))))

    def _silence(self, rows: int) -> Tensor:
        return torch.zeros(rows, device=self.device)


def block_causal(order: Tensor, block: int) -> Tensor:
    """Who sees whom [B, L, L] bool: tokens at positions ``order`` [B, L] see their own block and
    earlier ones.
    """
    which = order // block
    return which[:, :, None] >= which[:, None]


def two_copies(length: int, block: int) -> Tensor:
    """Who sees whom [2·L, 2·L] bool when BD3LM trains on [noisy | clean] copies of ``length`` = L
    tokens.

    Noisy tokens see their own noisy block and the clean blocks before it; clean ones are causal
    between blocks.
    """
    which = torch.arange(length) // block
    same, before = which[:, None] == which, which[:, None] > which
    none = torch.zeros_like(same)
    return torch.cat([torch.cat([same, before], 1), torch.cat([none, same | before], 1)])


def subs(logits: Tensor, tokens: Tensor, mask: int) -> Tensor:
    """Log-probabilities [B, L, v] by SUBS: never the mask, and a token that is no mask stays what
    it is.
    """
    barred = logits.clone()
    barred[..., mask] += NEVER
    filled = barred.log_softmax(-1)
    kept = torch.full_like(filled, NEVER).scatter(-1, tokens[..., None], 0.0)
    return torch.where((tokens == mask)[..., None], filled, kept)
