"""Tree attention by PyTorch's scaled dot product under a dense mask: for CPUs, and where Triton
does not run.

The mask is as large as the scores, and every slot is read. Slots must hold finite numbers, attended
or not: a weight of zero does not hide a NaN here.

Shape letters: R rows, B rows of lengths, H query heads, K key/value heads, T tree nodes, S slots, D
head width, W = ceil(T / 64) words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.kernels.tree_attention import TreeMask


def unpacked(words: Tensor, nodes: int) -> Tensor:
    """Whether bit j of ``words`` [..., W] is set, [..., T] bool for T = ``nodes``."""
    bits = torch.arange(nodes, device=words.device)
    return (words[..., bits // 64] >> (bits % 64) & 1).bool()


def dense_mask(mask: TreeMask, rows: int, slots: int) -> Tensor:
    """Whether each of T nodes attends each of S = ``slots`` slots, [R, 1, T, S] bool."""
    words, lengths, first = mask.words, mask.lengths, mask.first
    nodes = words.shape[1]
    place = torch.arange(slots, device=words.device)
    committed = (place < lengths[:, None]).repeat(rows // len(lengths), 1)  # [R, S]
    if mask.hidden is not None:
        committed[:, : mask.hidden.shape[1]] &= ~mask.hidden
    seen = committed[:, None].repeat(1, nodes, 1)
    seen[:, :, first : first + nodes] |= unpacked(words, nodes).repeat(rows // len(words), 1, 1)
    return seen[:, None]


def tree_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: TreeMask, scale: float, splits: int = 0
) -> Tensor:
    """Attention [R, T, H, D]; for the arguments see the operator."""
    seen = dense_mask(mask, len(q), keys.shape[2])
    grouped = q.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=seen, scale=scale, enable_gqa=grouped
    )
    empty = ~seen.any(-1, keepdim=True)  # softmax of nothing
    return out.masked_fill(empty, 0.0).transpose(1, 2).contiguous()
