"""A straightforward VAR loop: ours must equal it token for token.

adaLN is computed at every scale, keys and values grow by ``cat`` (those of the last scale too),
both halves of the guided batch go through the head at every scale, and the filters sort.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.randomness import Uniforms, categorical
from specmm.image_ar.scales.sampling import sorted_mask
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import MultiScaleQuantizer


def block_step(
    block: Any, x: Tensor, table: Tensor, cache: list[Tensor], l2_norm: bool, heads: int
) -> Tensor:
    """One layer on rows ``x`` [R, T, C], its keys and values [R, H, S, D] appended to ``cache``."""
    gate1, gate2, scale1, scale2, shift1, shift2 = table.unbind(2)
    attn, (rows, steps, width) = block.attn, x.shape
    y = F.layer_norm(x, (width,), eps=block.eps) * (1 + scale1) + shift1
    bias = torch.cat([attn.q_bias, attn.zero_k_bias, attn.v_bias])
    qkv = F.linear(y, attn.mat_qkv.weight, bias).view(rows, steps, 3, heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [R, H, T, D]
    scale = 0.25 / q.shape[-1] ** 0.5
    if l2_norm:
        q = (
            F.normalize(q, dim=-1)
            * attn.scale_mul_1H11.clamp_max(torch.log(torch.tensor(100.0))).exp()
        )
        k = F.normalize(k, dim=-1)
        scale = 1.0
    if cache:
        k = torch.cat([cache[0], k], dim=2)
        v = torch.cat([cache[1], v], dim=2)
    cache[:] = [k, v]
    y = (
        F.scaled_dot_product_attention(q, k, v, scale=scale)
        .transpose(1, 2)
        .reshape(rows, steps, width)
    )
    x = x + gate1 * attn.proj(y)
    y = F.layer_norm(x, (width,), eps=block.eps) * (1 + scale2) + shift2
    return x + gate2 * block.ffn.fc2(F.gelu(block.ffn.fc1(y), approximate="tanh"))


@torch.inference_mode()
def straightforward(
    model: VAR,
    quantizer: MultiScaleQuantizer,
    labels: Tensor,
    cfg: float,
    top_k: int,
    top_p: float,
    uniforms: Uniforms,
) -> tuple[list[Tensor], Tensor]:
    """Tokens [B, p²] of every scale, and the last f_hat; ``top_k`` 0 and ``top_p`` 1 are off."""
    config = model.config
    schedule = model.config.schedule
    cond = model.class_emb(torch.cat([labels, torch.full_like(labels, config.num_classes)]))
    places = model.lvl_embed(model.lvl_1L) + model.pos_1LC
    caches: list[list[Tensor]] = [[] for _ in model.blocks]
    f_hat = torch.zeros(len(labels), config.z_channels, schedule.sides[-1], schedule.sides[-1])
    tokens = []
    x = cond[:, None] + model.pos_start + places[:, : schedule.tokens(0)]
    for k in range(len(schedule)):
        for block, cache in zip(model.blocks, caches, strict=True):
            if config.shared_aln:
                table = block.ada_gss + model.shared_ada_lin(cond).view(len(cond), 1, 6, -1)
            else:
                table = block.ada_lin(cond).view(len(cond), 1, 6, -1)
            x = block_step(block, x, table, cache, config.attn_l2_norm, config.num_heads)
        scale, shift = model.head_nm.ada_lin(cond).view(len(cond), 1, 2, -1).unbind(2)
        logits = model.head(
            F.layer_norm(x, x.shape[-1:], eps=config.norm_eps) * (1 + scale) + shift
        )
        t = cfg * k / max(len(schedule) - 1, 1)
        logits = (1 + t) * logits[: len(labels)] - t * logits[len(labels) :]
        probs = sorted_mask(logits, top_k, top_p).softmax(-1)
        tokens.append(categorical(probs, uniforms.draw(schedule.tokens(k))))
        f_hat = f_hat + quantizer.contribution(quantizer.codes(tokens[-1]), k)
        if k + 1 < len(schedule):
            first, stop = schedule.starts[k + 1 : k + 3]
            x = model.word_embed(quantizer.downsample(f_hat, k + 1)) + places[:, first:stop]
            x = x.repeat(2, 1, 1)
    return tokens, f_hat
