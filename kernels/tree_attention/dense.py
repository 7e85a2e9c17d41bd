"""Tree attention by PyTorch's scaled dot product under a dense mask: for CPUs, and where Triton
does not run.

The mask is as large as the scores, and every slot is read. Slots must hold finite numbers, attended
or not: a weight of zero does not hide a NaN here.

Shape letters: R rows, B rows of lengths, H query heads, K key/value heads, T tree nodes, S slots, D
head width, W = ceil(T / 64) words.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specmm.kernels.tree_attention.masks import TreeMask, dense_mask


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
