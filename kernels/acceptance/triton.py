"""Fused acceptance in Triton: from a round's distributions (or logits) and uniforms to the result,
one program a row.

Shape letters: B batch, N nodes, V vocabulary, D deepest level, W codes, J columns of the neighbour
table.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
from torch import Tensor

from specmm.kernels.acceptance.bottom_up import climb
from specmm.kernels.acceptance.top_down import SCRATCH, walk

BLOCK = 2048  # tokens read at a time
WARPS = 8


def accept(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    drafts: Tensor | None,
    table: Tensor | None,
    near: int,
    bound: float,
    factor: bool,
    offset: int,
    processing: list[float] | None,
    leaves_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, kept and next token; for the arguments see ``op.accept``."""
    batch, nodes, vocabulary = probs.shape
    path = parents.new_full((batch, depth + 1), -1)
    kept, following = parents.new_empty(batch), parents.new_empty(batch)
    temperature, top_k, top_p, top_p_first = processing or (1.0, 0, 1.0, False)
    given = [
        x.contiguous()
        for x in (probs, tokens, parents, uniforms, probs if drafts is None else drafts)
    ]
    found, dist = (path, kept, following), (max(temperature, 1e-5), float(top_k), top_p)
    options = dict(
        LOGITS=processing is not None, GREEDY=temperature == 0, TOP_P=top_p < 1, TOP_P_FIRST=bool(top_p_first),
        DRAWN=drafts is not None, BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=WARPS,
    )  # fmt: skip
    sizes = nodes, len(parents), depth + 1, vocabulary
    if leaves_first:
        scratch = probs.new_empty(batch, depth + 1, vocabulary)
        climb[(batch,)](
            *given, scratch, *found, *sizes, *dist, NODES=triton.next_power_of_2(nodes), **options
        )
        return found
    codes, columns = (0, 0) if table is None else table.shape
    walk[(batch,)](
        *given, parents if table is None else table.contiguous(),
        probs.new_empty(batch, SCRATCH.value, vocabulary), *found,
        *sizes, codes, columns, offset, bound, *dist,
        FACTOR=factor, NEAR=near, NEAR_BLOCK=triton.next_power_of_2(max(near, 1)), **options,
    )  # fmt: skip
    return found
