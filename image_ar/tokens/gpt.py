"""LlamaGen's autoregressive transformer, class- and text-conditional, with the official parameter
names.

Source: LlamaGen (arXiv 2406.06525). Shape letters: R rows (batch, doubled under guidance), T query
positions, S cached positions, C width, H heads, D head width, V vocabulary, P prefix positions (1
for classes, 120 for text).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.core.cache import Memory
from specmm.kernels.tree_attention import Mask, attend


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model."""

    dim: int = 768
    n_layer: int = 12
    n_head: int = 12
    vocab_size: int = 16384
    block_size: int = 256
    model_type: Literal["c2i", "t2i"] = "c2i"
    num_classes: int = 1000
    cls_token_num: int = 1
    caption_dim: int = 2048
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % self.n_head or self.head_dim % 4:
            raise ValueError(
                f"dim must be n_head times a multiple of 4, got {self.dim} and {self.n_head} heads"
            )
        if self.grid**2 != self.block_size:
            raise ValueError(f"block_size must be a square number, got {self.block_size}")

    @property
    def head_dim(self) -> int:
        """D."""
        return self.dim // self.n_head

    @property
    def grid(self) -> int:
        """Tokens along one side of the picture."""
        return round(self.block_size**0.5)

    @property
    def ffn_dim(self) -> int:
        """Inner width of the feed-forward layers: 8C/3 (times a multiplier), rounded up."""
        width = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of


PUBLISHED = {
    "GPT-B": dict(n_layer=12, n_head=12, dim=768),
    "GPT-L": dict(n_layer=24, n_head=16, dim=1024),
    "GPT-XL": dict(n_layer=36, n_head=20, dim=1280),
    "GPT-XXL": dict(n_layer=48, n_head=24, dim=1536),
    "GPT-3B": dict(n_layer=24, n_head=32, dim=3200),
}


def rotary_table(grid: int, head_dim: int, prefix: int, base: float = 10000.0) -> Tensor:
    """Two-dimensional rotary factors [prefix + cells, D/2, 2] (cos, sin); the prefix rows are all
    zero.

    Cell (r, c) turns the first half of the pairs by r·f and the second by c·f.
    """
    half = head_dim // 2
    freqs = base ** (-torch.arange(0, half, 2)[: half // 2].float() / half)  # [D/4]
    angles = torch.outer(torch.arange(grid).float(), freqs)  # [side, D/4]
    down = angles[:, None].expand(grid, grid, -1)
    across = angles[None].expand(grid, grid, -1)
    cells = torch.cat([down, across], dim=-1).flatten(0, 1)  # [cells, D/2]
    table = torch.stack([cells.cos(), cells.sin()], dim=-1)
    return torch.cat([torch.zeros(prefix, half, 2), table])


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Turn interleaved pairs of ``x`` [R, T, H, D] by ``factors`` [R or 1, T, 1, D/2], in fp32."""
    if torch.compiler.is_compiling():  # the compiler cannot fuse complex arithmetic
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos = factors.real
        sin = factors.imag
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)


class RotaryTable(nn.Module):
    """A table of rotary factors that follows its module from device to device but is never cast."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        """``table`` [positions, D/2, 2] of (cos, sin)."""
        super().__init__()
        self.register_buffer("table", torch.view_as_complex(table), persistent=False)

    def first(self, count: int) -> Tensor:
        """Factors [1, T, 1, D/2] of the first T = ``count`` positions."""
        return self.table[None, :count, None]

    def at(self, positions: Tensor) -> Tensor:
        """Factors [R or 1, T, 1, D/2] at ``positions`` [R or 1, T], clamped to the last row."""
        return self.table[positions.clamp(max=len(self.table) - 1)][:, :, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the table; a cast to a real dtype would drop its sines."""
        self.table = self.table.to(fn(torch.empty(0, device=self.table.device)).device)
        return self


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and cast back before the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class LlamaGenAttention(nn.Module):
    """Self-attention whose ``wqkv`` rows are [all queries | all keys | all values]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self, x: Tensor, factors: Tensor, bias: Mask, memory: Memory | None, last: int = 0
    ) -> Tensor:
        """Attend ``x`` [R, T, C] to itself (causally) or, with ``memory``, to its slots under
        ``bias``; only the ``last`` of the T positions, if given.
        """
        rows, steps, _ = x.shape
        qkv = self.wqkv(x).view(rows, steps, 3 * self.heads, -1)
        turned = rotate(qkv[:, :, : 2 * self.heads], factors)
        q = turned[:, :, : self.heads].transpose(1, 2)  # [R, H, T, D]
        if last:
            q = q[:, :, -last:]
        k = turned[:, :, self.heads :]  # [R, T, H, D]
        v = qkv[:, :, 2 * self.heads :]
        if memory is not None:
            k, v = memory.write(k, v)
        causal = memory is None and bias is None
        y = attend(q, k.transpose(1, 2), v.transpose(1, 2), bias, causal=causal)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU of width ``inner``."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward (``inner``, 0: ``config.ffn_dim``), with residuals."""

    def __init__(self, config: GPTConfig, inner: int = 0) -> None:
        super().__init__()
        self.attention = LlamaGenAttention(config)
        self.feed_forward = FeedForward(config.dim, inner or config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, x: Tensor, factors: Tensor, bias: Mask, memory: Memory | None, last: int = 0
    ) -> Tensor:
        """[R, T, C] -> [R, T, C], or the ``last`` positions of it, whose ``bias`` is given."""
        read = self.attention(self.attention_norm(x), factors, bias, memory, last)
        x = (x[:, -last:] if last else x) + read
        return x + self.feed_forward(self.ffn_norm(x))


class LabelEmbedder(nn.Module):
    """Class ids [R] -> prefix [R, 1, C]; id ``num_classes`` is "no class"."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Look the classes up."""
        return self.embedding_table(ids)[:, None]

    def unconditional(self, ids: Tensor) -> Tensor:
        """ "No class" for each of ``ids``."""
        return torch.full_like(ids, self.embedding_table.num_embeddings - 1)


class CaptionEmbedder(nn.Module):
    """T5 features [R, P, caption_dim] -> prefix [R, P, C]; ``uncond_embedding`` is "no caption"."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        fc1 = nn.Linear(config.caption_dim, config.dim, bias=False)
        fc2 = nn.Linear(config.dim, config.dim, bias=False)
        self.cap_proj = nn.ModuleDict({"fc1": fc1, "fc2": fc2})
        nothing = torch.randn(config.cls_token_num, config.caption_dim) * 0.01
        self.uncond_embedding = nn.Parameter(nothing)

    def forward(self, features: Tensor) -> Tensor:
        """Project the features."""
        return self.cap_proj["fc2"](F.gelu(self.cap_proj["fc1"](features), approximate="tanh"))

    def unconditional(self, features: Tensor) -> Tensor:
        """ "No caption" for each of ``features``."""
        return self.uncond_embedding.to(features.dtype).expand_as(features)


class Transformer(nn.Module):
    """The model: a prefix (class or caption), then image tokens in raster order."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        embedder = LabelEmbedder if config.model_type == "c2i" else CaptionEmbedder
        self.cls_embedding = embedder(config)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        table = rotary_table(config.grid, config.head_dim, config.cls_token_num, config.rope_base)
        self.rotary = RotaryTable(table)
        self.apply(_initialise)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        bias: Mask = None,
        memories: list[Memory] | None = None,
        aux_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run embeddings ``x`` [R, T, C] through the layers.

        ``positions`` [R or 1, T] default to 0 … T-1. Without ``memories`` the attention is causal,
        unless an additive ``bias`` [R or 1, 1, T, S] or a tree's mask is given. Returns logits [R,
        T, V] and the hidden states after the final norm, followed by the inputs of each of
        ``aux_layers``: [R, T, C · (1 + auxiliary layers)].
        """
        factors = self.rotary.first(x.shape[1]) if positions is None else self.rotary.at(positions)
        auxiliary = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                auxiliary.append(x)
            x = layer(x, factors, bias, memories[i] if memories else None)
        hidden = self.norm(x)
        read = torch.cat([hidden, *auxiliary], dim=-1) if auxiliary else hidden
        return self.output(hidden), read

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.output.weight.dtype

    def embed(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings [R, P + T, C] of a condition (class ids [R] or features) and tokens [R, T]."""
        return torch.cat([self.cls_embedding(prefix), self.tok_embeddings(tokens)], dim=1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
