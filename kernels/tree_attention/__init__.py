"""Tree attention, ``torch.ops.specmm.tree_attention``: a draft tree's queries over a ragged prefix
and their ancestors; its mask ``TreeMask``; and ``attend``, which models call.

Shape letters: R rows, B rows of lengths (R a multiple of B; row r takes length r % B, as guidance
repeats a batch), H query heads, K key/value heads, T tree nodes, S slots, D head width, W = ceil(T
/ 64) words.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.kernels.backend import backend
from specmm.kernels.tree_attention.dense import ragged_attention
from specmm.kernels.tree_attention.masks import ChainsMask as ChainsMask
from specmm.kernels.tree_attention.masks import Nodes as Nodes
from specmm.kernels.tree_attention.masks import PackedMask as PackedMask
from specmm.kernels.tree_attention.masks import Part as Part
from specmm.kernels.tree_attention.masks import RaggedMask as RaggedMask
from specmm.kernels.tree_attention.masks import TreeMask as TreeMask

WIDEST = 256  # head width
MOST_NODES = 256
Mask: TypeAlias = Tensor | TreeMask | RaggedMask | None


@torch.library.custom_op("specmm::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    words: Tensor,
    lengths: Tensor,
    first: int,
    scale: float,
    hidden: Tensor | None = None,
    splits: int = 0,
) -> Tensor:
    """Attention [R, T, H, D] of a tree's queries ``q`` [R, H, T, D] over ``keys`` and ``values``
    [R, K, S, D].

    Keys and values may have any strides except the last (caches of [R, S, K, D] can be passed
    transposed); H is a multiple of K. See :class:`TreeMask` for ``words``, ``lengths``, ``first``
    and ``hidden``. ``scale`` multiplies the scores. ``splits``: parts into which the prefix is cut,
    0 for as many as suit the GPU. A query that attends to nothing gives zeros. Raises
    ``ValueError`` on sizes that do not fit together.
    """
    mask = TreeMask(words, lengths, first, hidden)
    _check(q, keys, values, mask)
    if backend(q.device) == "triton":
        from specmm.kernels.tree_attention.triton import tree_attention as run
    else:
        from specmm.kernels.tree_attention.dense import tree_attention as run
    return run(q, keys, values, mask, scale, splits)


@tree_attention.register_fake
def _(q: Tensor, *others: object, **options: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Mask, *, causal: bool = False) -> Tensor:
    """Attention [R, H, T, D] of ``q`` [R, H, T, D] over ``keys`` and ``values`` [R, K, S, D].

    With a :class:`TreeMask` the operator runs, with a dense mask or none PyTorch's attention (at no
    extra cost), and with a :class:`RaggedMask` attention by groups of rows.
    """
    if isinstance(mask, TreeMask):
        out: Tensor = tree_attention(
            *(q, keys, values, mask.words, mask.lengths, mask.first, q.shape[-1] ** -0.5),
            mask.hidden,
        )
        return out.transpose(1, 2)
    if isinstance(mask, RaggedMask):
        return ragged_attention(q, keys, values, mask, q.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal)


def _check(q: Tensor, keys: Tensor, values: Tensor, mask: TreeMask) -> None:
    """Raise ``ValueError`` for sizes, dtypes and strides that do not fit together."""
    words, lengths, hidden = mask.words, mask.lengths, mask.hidden
    rows, heads, nodes, width = q.shape
    _, kv, slots, _ = keys.shape
    if not 1 <= width <= WIDEST:
        raise ValueError(f"head width must be in [1, {WIDEST}], got {width}")
    if keys.shape != values.shape or keys.shape != (rows, kv, slots, width) or heads % kv:
        raise ValueError(
            f"keys and values must be [{rows}, a divisor of {heads}, S, {width}] for queries "
            f"{list(q.shape)}, got {list(keys.shape)} and {list(values.shape)}"
        )
    fits = words.shape == (len(words), nodes, -(-nodes // 64)) and rows % len(words) == 0
    if not 1 <= nodes <= MOST_NODES or not fits:
        raise ValueError(
            f"words must be [1 or B, T, ceil(T / 64)] for 1 to {MOST_NODES} nodes, got "
            f"{list(words.shape)} for {nodes} nodes; TreeShape.ancestor_words has them"
        )
    if rows % len(lengths) or words.dtype != torch.int64 or not 0 <= mask.first <= slots - nodes:
        raise ValueError(
            f"lengths must be [B] with B a divisor of {rows}, words int64 and first in "
            f"[0, {slots - nodes}], got {list(lengths.shape)}, {words.dtype} and {mask.first}"
        )
    if hidden is not None and (
        hidden.dtype != torch.bool or len(hidden) != rows or hidden.shape[1] > slots
    ):
        raise ValueError(
            f"hidden must be bool [{rows}, at most {slots}], got {hidden.dtype} "
            f"{list(hidden.shape)}"
        )
    dense_axes = all(x.stride(-1) == 1 for x in (q, keys, values))
    if not (dense_axes and words.is_contiguous() and lengths.is_contiguous()):
        raise ValueError(
            "the last axis of q, keys and values must be dense, words and lengths contiguous"
        )
