"""Tree attention by PyTorch's scaled dot product under a dense mask: for CPUs, and where Triton
does not run.

The mask is as large as the scores, and every slot is read. All slots must hold finite numbers, even
masked ones: a weight of zero does not hide a NaN here.

Shape letters: R rows, B rows of lengths, H query heads, K key/value heads, T tree nodes, S slots, D
head width, W = ceil(T / 64) words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.kernels.tree_attention.masks import ChainsMask, RaggedMask, TreeMask, dense_mask


def tree_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: TreeMask, scale: float, splits: int = 0
) -> Tensor:
    """Attention [R, T, H, D]; for the arguments see the operator."""
    visible = dense_mask(mask, len(q), keys.shape[2])
    grouped = q.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible, scale=scale, enable_gqa=grouped
    )
    empty = ~visible.any(-1, keepdim=True)  # softmax of nothing
    return out.masked_fill(empty, 0.0).transpose(1, 2).contiguous()


def ragged_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: RaggedMask, scale: float
) -> Tensor:
    """Attention [R, H, T, D] of ``q`` [R, H, T, D] over ``keys`` and ``values`` [R, K, S, D];
    outputs of nodes that the ``mask`` leaves out are arbitrary.
    """
    grouped = q.shape[1] != keys.shape[1]
    out = torch.empty_like(q)
    for start, stop, slots, bias in mask.groups:
        k, v = (_seen(x[start:stop], slots, mask.first) for x in (keys, values))
        nodes = bias.shape[2]
        out[start:stop, :, :nodes] = F.scaled_dot_product_attention(
            q[start:stop, :, :nodes], k, v, attn_mask=bias, scale=scale, enable_gqa=grouped
        )
    return out


def chains_attention(
    q: Tensor, held: Sequence[tuple[Tensor, Tensor]], mask: ChainsMask, scale: float
) -> Tensor:
    """Attention [1, M, H, D] of ``q`` [1, H, M, D], row after row, each over its own keys and
    values [1, K, S, D] in ``held``.
    """
    found = []
    for own, (k, v), bias in zip(q.split(mask.sizes, 2), held, mask.biases, strict=True):
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            own, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped
        )
        found.append(out.transpose(1, 2))
    return torch.cat(found, 1)


def _seen(x: Tensor, slots: int, first: int) -> Tensor:
    """The first ``slots`` slots of ``x`` [n, K, S, D], and the slots from ``first`` on."""
    return x if slots == first else torch.cat([x[:, :, :slots], x[:, :, first:]], 2)
