"""Tree attention, one query at a time in float64: the reference for tests of the other
implementations.

Shape letters: R rows, B rows of lengths (R a multiple of B; row r takes length r % B), H query
heads, K key/value heads, T tree nodes, S slots, D head width, W = ceil(T / 64) words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.kernels.tree_attention.masks import TreeMask


def tree_attention(q: Tensor, keys: Tensor, values: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """Attention [R, T, H, D] in float64; for the arguments see
    ``specmm.kernels.tree_attention.tree_attention``.

    A query that attends to nothing gives zeros.
    """
    rows, heads, nodes, _ = q.shape
    words, lengths, hidden = mask.words, mask.lengths, mask.hidden
    out = q.new_zeros(rows, nodes, heads, q.shape[-1], dtype=torch.float64)
    group = heads // keys.shape[1]
    for r in range(rows):
        for t in range(nodes):
            slots = seen_slots(
                words[r % len(words), t], int(lengths[r % len(lengths)]), nodes, mask.first
            )
            if hidden is not None:
                slots = [s for s in slots if s >= hidden.shape[1] or not hidden[r, s]]
            for h in range(heads):
                k = keys[r, h // group, slots].double()
                v = values[r, h // group, slots].double()
                out[r, t, h] = (k @ q[r, h, t].double() * scale).softmax(0) @ v
    return out


def seen_slots(words: Tensor, length: int, nodes: int, first: int) -> list[int]:
    """Slots attended to with ancestor ``words`` [W]: the prefix, and ancestors from ``first``."""
    bits = [int(words[n // 64]) >> (n % 64) & 1 for n in range(nodes)]
    return [*range(length), *(first + n for n in range(nodes) if bits[n])]
