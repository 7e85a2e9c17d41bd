"""Which slots a tree's nodes attend: in words of ancestors, and as a dense mask.

Shape letters: R rows, B rows of lengths, T tree nodes, S slots, W = ceil(T / 64) words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeMask:
    """The slots each node of a tree attends to: its row's committed ones, and its ancestors'.

    ``words`` [1 or B, T, W] int64 is :attr:`specmm.core.tree.TreeShape.ancestor_words`; ``lengths``
    [B] int64 counts committed slots, from slot 0 on; node j lies in slot ``first`` + j; ``hidden``
    [R, up to S] bool hides committed ones. ``row_invariant`` is the operator's.
    """

    words: Tensor
    lengths: Tensor
    first: int
    hidden: Tensor | None = None
    row_invariant: bool = False


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
