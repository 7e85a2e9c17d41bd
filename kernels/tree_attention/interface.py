"""``attn_implementation="specmm_tree"`` for transformers models: importing this module registers
it.

Attention is transformers' own SDPA until a forward gets a ``tree_mask``, which models pass on to
their attention layers. With a :class:`TreeMask` the operator runs, grouped heads included, and no
mask is built; with a :class:`RaggedMask` SDPA runs by groups of rows, with a
:class:`PackedMask` each part by its own. Such a forward needs the
4-dimensional ``PLACEHOLDER`` as its ``attention_mask``, or transformers builds a mask that is never
read.

Shape letters: R rows, H query heads, K key/value heads, T tree nodes, S slots, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specmm.kernels.tree_attention import (
    ChainsMask,
    PackedMask,
    RaggedMask,
    TreeMask,
    tree_attention,
)
from specmm.kernels.tree_attention.dense import chains_attention, ragged_attention

NAME = "specmm_tree"
PLACEHOLDER = torch.zeros(1, 1, 1, 1)


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree_mask: TreeMask | RaggedMask | PackedMask | None = None,
    **options: Any,  # transformers'
) -> tuple[Tensor, None]:
    """Attention [R, T, H, D] of ``query`` [R, H, T, D] over ``key`` and ``value`` [R, K, S, D]."""
    if tree_mask is None:
        mask = None if attention_mask is PLACEHOLDER else attention_mask
        inputs = (module, query, key, value, mask)
        return sdpa_attention_forward(*inputs, dropout=dropout, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(tree_mask, PackedMask):
        found = []
        each = zip(tree_mask.parts, tree_mask.split(query, 2), tree_mask.held, strict=True)
        for part, own, held in each:
            if isinstance(part.mask, ChainsMask):
                found.append(chains_attention(own, held, part.mask, scale))
            else:
                key, value = held
                out = _by_operator(part.rows_of(own, 2), key, value, part.mask, scale)
                found.append(part.nodes.flat(out, 0)[None])
        return torch.cat(found, 1), None
    if isinstance(tree_mask, RaggedMask):
        return ragged_attention(query, key, value, tree_mask, scale).transpose(1, 2), None
    return _by_operator(query, key, value, tree_mask, scale), None


def _by_operator(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scale: float) -> Tensor:
    return tree_attention(
        query, key, value, mask.words, mask.lengths, mask.first, scale, mask.hidden
    )


AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
