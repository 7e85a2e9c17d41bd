"""Ways to attend a tree on the same inputs: ours, SDPA with a dense mask, flex_attention, a copy.

Shape letters: R rows, H query heads, K key/value heads, T tree nodes, S committed tokens, D head
width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.shapes import Inputs
from specmm.kernels.tree_attention import attend

Call: TypeAlias = Callable[[], Tensor]


def ours(given: Inputs) -> Call:
    """The operator, on the words."""
    return partial(attend, given.q, given.keys, given.values, given.mask)


def sdpa(given: Inputs) -> Call:
    """PyTorch's own; the mask is made beforehand, which a round would have to do."""
    grouped = given.q.shape[1] != given.keys.shape[1]
    return partial(
        F.scaled_dot_product_attention,
        given.q,
        given.keys,
        given.values,
        given.dense(),
        enable_gqa=grouped,
    )


def flex(given: Inputs) -> partial[Tensor]:
    """flex_attention, compiled, with the tree as its mask; the block mask is made beforehand."""
    torch._dynamo.reset()  # every shape and tree is a compilation, and there is a limit to them
    first = given.mask.first
    ancestors = given.ancestors[0]

    def seen(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return (slot < first) | ancestors[query, (slot - first).clamp(min=0)]

    nodes = given.q.shape[2]
    slots = given.keys.shape[2]
    blocks = create_block_mask(seen, None, None, nodes, slots, device=given.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = given.q.shape[1] != given.keys.shape[1]
    return partial(
        compiled, given.q, given.keys, given.values, block_mask=blocks, enable_gqa=grouped
    )


def copy(given: Inputs) -> Call:
    """Keys and values copied: each byte is read and written once."""
    source = given.keys.transpose(1, 2)
    both = torch.as_strided(source, (2, *source.shape), (_apart(given), *source.stride()))
    return partial(torch.empty_like(both).copy_, both)


def _apart(given: Inputs) -> int:
    return given.values.storage_offset() - given.keys.storage_offset()


def calls(name: str, inputs: Sequence[Inputs]) -> list[Call]:
    """A call for each of ``inputs``; flex_attention is compiled once, for the first one's tree."""
    if name != "flex":
        return [CONTENDERS[name](given) for given in inputs]
    one = flex(inputs[0])
    return [partial(one.func, x.q, x.keys, x.values, **one.keywords) for x in inputs]


CONTENDERS: dict[str, Callable[[Inputs], Call]] = {
    "ours": ours,
    "sdpa": sdpa,
    "copy": copy,
    "flex": flex,
}
