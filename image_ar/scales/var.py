"""VAR, the next-scale transformer, with the official parameter names and buffers.

Source: VAR (arXiv 2404.02905). A forward takes whole scales: tokens of one scale see each other and
all coarser ones. Values that depend only on the class (adaLN, the largest matrices of a block) are
computed once by ``condition``. Shape letters: R rows (batch, doubled under guidance), T query
positions, S attended positions, L all positions, C width, H heads, D head width, E code width, V
vocabulary, K scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.image_ar.scales.scale_schedule import (
    PATCHES_256,
    PATCHES_512,
    ScaleSchedule,
    scale_bias,
)
from specmm.loading.hardware import product

LOG_MAX_SCALE = math.log(100)  # the bound of attn_l2_norm's learnt temperature
NORM_EPS = 1e-12  # the least that a query or a key is divided by
PUBLISHED_HEAD_DIM = 64
PUBLISHED_PATCHES = {256: PATCHES_256, 512: PATCHES_512}


@dataclass(frozen=True)
class VARConfig:
    """Sizes of a model; the defaults are the published VAR-d16 for 256 px."""

    depth: int = 16
    embed_dim: int = 1024
    num_heads: int = 16
    mlp_ratio: float = 4.0
    vocab_size: int = 4096
    z_channels: int = 32
    num_classes: int = 1000
    patch_nums: tuple[int, ...] = PATCHES_256
    shared_aln: bool = False
    attn_l2_norm: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {self.embed_dim} "
                f"and {self.num_heads}"
            )
        ScaleSchedule(self.patch_nums)

    @property
    def schedule(self) -> ScaleSchedule:
        """The scales."""
        return ScaleSchedule(self.patch_nums)

    @property
    def hidden_dim(self) -> int:
        """Inner width of the feed-forward layers."""
        return round(self.embed_dim * self.mlp_ratio)


def published(depth: int, resolution: int = 256) -> VARConfig:
    """The sizes of VAR-d``depth``; raises ``ValueError`` for an unpublished resolution."""
    if depth < 1 or resolution not in PUBLISHED_PATCHES:
        raise ValueError(
            f"depth must be at least 1 and resolution 256 or 512, got {depth} and {resolution}"
        )
    patches = PUBLISHED_PATCHES[resolution]
    width = PUBLISHED_HEAD_DIM * depth
    return VARConfig(depth, width, depth, patch_nums=patches, shared_aln=resolution == 512)


class BlockCondition(NamedTuple):
    """Values of a block that depend only on the class.

    Factors [R, 1, C] (1 is added to both scales), the bias [3C] of the fused projection and the
    factors [2, H, 1] of attn_l2_norm's queries (a temperature) and keys (1).
    """

    gate1: Tensor
    gate2: Tensor
    scale1: Tensor
    scale2: Tensor
    shift1: Tensor
    shift2: Tensor
    qkv_bias: Tensor
    qk_scale: Tensor | None


class ClassCondition(NamedTuple):
    """Values of a model that depend only on the class; ``head``: the head's scale and shift."""

    embedding: Tensor  # [R, C]
    blocks: list[BlockCondition]
    head: tuple[Tensor, Tensor]


class ScaleCache:
    """One layer's ``keys`` and ``values`` [R, S, H, D]; queries attend to the first ``filled``.

    Without ``keep``, new keys and values (of the last scale) are used once and not stored.
    """

    state: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.filled = 0
        self.keep = True

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``k`` and ``v`` [R, T, H, D]; all keys and values to attend [R, S, H, D]."""
        if not self.keep:
            keys, values = self.keys[:, : self.filled], self.values[:, : self.filled]
            return torch.cat([keys, k], 1), torch.cat([values, v], 1)
        stop = self.filled + k.shape[1]
        self.keys[:, self.filled : stop] = k
        self.values[:, self.filled : stop] = v
        return self.keys[:, :stop], self.values[:, :stop]


def modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Layer norm of ``x`` [R, T, C] without weights, times ``scale``, plus ``shift`` [R, 1, C]."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps), scale)


class VARAttention(nn.Module):
    """Attention with fused projections and no key bias (``zero_k_bias`` is an official buffer)."""

    zero_k_bias: Tensor

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        width = config.embed_dim
        self.heads = config.num_heads
        self.l2_norm = config.attn_l2_norm
        self.scale = 1.0 if config.attn_l2_norm else 0.25 / math.sqrt(width // config.num_heads)
        if config.attn_l2_norm:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, self.heads, 1, 1), math.log(4.0)))
        self.mat_qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("zero_k_bias", torch.zeros(width))
        self.proj = nn.Linear(width, width)

    def fixed(self) -> tuple[Tensor, Tensor | None]:
        """The fused bias [3C] and the factors [2, H, 1] of normalised queries and keys."""
        bias = torch.cat([self.q_bias, self.zero_k_bias, self.v_bias])
        if not self.l2_norm:
            return bias, None
        scale = self.scale_mul_1H11.clamp(max=LOG_MAX_SCALE).exp()[0, :, 0]
        return bias, torch.stack([scale, torch.ones_like(scale)])

    def forward(
        self,
        x: Tensor,
        cond: BlockCondition,
        bias: Tensor | None,
        store: ScaleCache | None,
        tail: int,
    ) -> Tensor:
        """The last ``tail`` rows of ``x`` [R, T, C] attend to all of it and to the ``store``."""
        qkv = product(self.mat_qkv, x, cond.qkv_bias).view(*x.shape[:2], 3, self.heads, -1)
        qk, v = qkv[:, :, :2], qkv[:, :, 2]  # [R, T, 2, H, D], [R, T, H, D]
        if cond.qk_scale is not None:
            # Queries and keys at once, the factors multiplied into the norms: half the time.
            # float16 cannot divide by short vectors, so its norms are float32.
            wide = torch.float32 if qk.dtype == torch.float16 else None
            norms = torch.linalg.vector_norm(qk, dim=-1, keepdim=True, dtype=wide)
            qk = (qk * (cond.qk_scale / norms.clamp_min(NORM_EPS))).to(v.dtype)
        q, k = qk.unbind(2)
        if store is not None:
            k, v = store.write(k, v)
        q, k, v = (part.transpose(1, 2) for part in (q[:, -tail:], k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        return self.proj(y.transpose(1, 2).flatten(2))


class FFN(nn.Module):
    """Two linear layers with a GELU (tanh) between them."""

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, config.hidden_dim)
        self.fc2 = nn.Linear(config.hidden_dim, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        if torch.is_grad_enabled():  # the fused product has no gradient
            return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return self.fc2(product(self.fc1, x, self.fc1.bias, gelu=True))


class VARBlock(nn.Module):
    """Attention and feed-forward, each gated, scaled and shifted by the class (adaLN)."""

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        width = config.embed_dim
        self.eps = config.norm_eps
        self.shared_aln = config.shared_aln
        self.attn = VARAttention(config)
        self.ffn = FFN(config)
        if config.shared_aln:
            self.ada_gss = nn.Parameter(torch.randn(1, 1, 6, width) / width**0.5)
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def condition(self, cond: Tensor) -> BlockCondition:
        """The block's condition from the class embedding [R, C] or shared adaLN [R, 1, 6, C]."""
        if self.shared_aln:
            table = self.ada_gss + cond
        else:
            table = self.ada_lin(cond).unflatten(-1, (1, 6, -1))
        gate1, gate2, scale1, scale2, shift1, shift2 = table.unbind(2)
        fixed = self.attn.fixed()
        return BlockCondition(gate1, gate2, scale1 + 1, scale2 + 1, shift1, shift2, *fixed)

    def forward(
        self,
        x: Tensor,
        cond: BlockCondition,
        bias: Tensor | None,
        store: ScaleCache | None,
        tail: int,
    ) -> Tensor:
        """[R, T, C] -> its last ``tail`` rows; the others only serve as keys and values."""
        modulated = modulate(x, cond.scale1, cond.shift1, self.eps)
        x = torch.addcmul(x[:, -tail:], cond.gate1, self.attn(modulated, cond, bias, store, tail))
        inner = modulate(x, cond.scale2, cond.shift2, self.eps)
        return torch.addcmul(x, cond.gate2, self.ffn(inner))


class HeadNorm(nn.Module):
    """The adaLN in front of the head."""

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(config.embed_dim, 2 * config.embed_dim))

    def condition(self, cond: Tensor) -> tuple[Tensor, Tensor]:
        """Scale (plus 1) and shift [R, 1, C] in float32."""
        scale, shift = self.ada_lin(cond).float().unflatten(-1, (1, 2, -1)).unbind(2)
        return scale + 1, shift


class VAR(nn.Module):
    """The model: scale 0 from the class, then each scale from f_hat downsampled to its side."""

    lvl_1L: Tensor
    attn_bias_for_masking: Tensor
    step_rows = 64  # see specmm.choose.threads

    def __init__(self, config: VARConfig) -> None:
        super().__init__()
        schedule = config.schedule
        width = config.embed_dim
        length = schedule.length
        self.config = config
        self.word_embed = nn.Linear(config.z_channels, width)
        self.class_emb = nn.Embedding(config.num_classes + 1, width)
        self.pos_start = nn.Parameter(torch.empty(1, schedule.tokens(0), width))
        self.pos_1LC = nn.Parameter(torch.empty(1, length, width))
        self.lvl_embed = nn.Embedding(len(schedule), width)
        if config.shared_aln:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(VARBlock(config) for _ in range(config.depth))
        self.head_nm = HeadNorm(config)
        self.head = nn.Linear(width, config.vocab_size)
        self.register_buffer("lvl_1L", schedule.levels)
        self.register_buffer("attn_bias_for_masking", torch.empty(1, 1, length, length))
        self.reset_mask()
        _initialise(self)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype (diffusers asks)."""
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.weight.device

    def reset_mask(self) -> None:
        """Write the training mask: a position sees its own scale and the coarser ones."""
        self.attn_bias_for_masking.copy_(scale_bias(self.lvl_1L, self.lvl_1L))

    def condition(self, labels: Tensor) -> ClassCondition:
        """All that depends on the classes ``labels`` [R] alone; ``num_classes`` means none."""
        cond = self.class_emb(labels)  # [R, C]
        table = cond
        if self.config.shared_aln:
            table = self.shared_ada_lin(cond).unflatten(-1, (1, 6, -1))
        blocks = [cast(VARBlock, block).condition(table) for block in self.blocks]
        return ClassCondition(cond, blocks, self.head_nm.condition(cond))

    def positions(self) -> Tensor:
        """Embeddings [1, L, C] of scale and position."""
        return self.lvl_embed(self.lvl_1L) + self.pos_1LC

    def start(self, embedding: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [R, T, C] of scale 0, from the class embedding [R, C]."""
        return embedding[:, None] + self.pos_start + positions[:, : self.pos_start.shape[1]]

    def run(
        self,
        x: Tensor,
        cond: ClassCondition,
        bias: Tensor | None = None,
        stores: Sequence[ScaleCache | None] | None = None,
        tail: int | None = None,
    ) -> Tensor:
        """The blocks over embeddings [R, T, C] of one scale, or of several under ``bias``.

        ``bias`` [1, 1, T, S]. Returns the last ``tail`` rows (all without it): the last block
        computes no others.
        """
        stores = stores or [None] * len(self.blocks)
        last = len(self.blocks) - 1
        for i, (block, factors) in enumerate(zip(self.blocks, cond.blocks, strict=True)):
            rows = (tail or x.shape[1]) if i == last else x.shape[1]
            block_bias = bias if bias is None else bias[:, :, -rows:]
            x = block(x, factors, block_bias, stores[i], rows)
        return x

    def normed(self, x: Tensor, head: tuple[Tensor, Tensor]) -> Tensor:
        """The head's input from the output of ``run``; always float32."""
        return modulate(x.float(), *head, self.config.norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """Float32 logits [R, T, V] of ``normed`` states [R, T, C]."""
        return self.head(normed.to(self.dtype)).float()

    def forward(self, labels: Tensor, inputs: Tensor) -> Tensor:
        """Logits [R, T, V] of whole scales at once (teacher forcing; eq. 6 of the paper).

        ``inputs`` [R, T - first scale, E]: the tokenizer's inputs for all scales but the first; the
        finest may be left out.
        """
        cond = self.condition(labels)
        positions = self.positions()
        start = self.start(cond.embedding, positions)
        first = start.shape[1]
        stop = first + inputs.shape[1]
        later = self.word_embed(inputs.to(self.dtype)) + positions[:, first:stop]
        x = torch.cat([start, later], dim=1)
        x = self.run(x, cond, self.attn_bias_for_masking[:, :, :stop, :stop])
        return self.logits(self.normed(x, cond.head))


@torch.no_grad()
def _initialise(model: VAR) -> None:
    """Weights to train from: blocks that start near the identity, small logits."""
    std = (3 * model.config.embed_dim) ** -0.5
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for embedding in (model.pos_start, model.pos_1LC):
        nn.init.trunc_normal_(embedding, std=std)
    model.head.weight.mul_(0.02)
    depth = (2 * len(model.blocks)) ** -0.5
    for name, weight in model.named_parameters():
        if name.endswith(("attn.proj.weight", "ffn.fc2.weight")):
            weight.mul_(depth)
