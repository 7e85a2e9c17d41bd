"""Fused acceptance from the root down, in Triton, one program a row: recursive, point mass, LANTERN
and LANTERN++.

Nodes are visited in ascending order, which is the walk from the root down with siblings by rank,
since a node comes after its parent: a child of the node reached so far is tested; accepted, it
becomes the node reached; rejected, it changes the target its later siblings face. Only the
distributions of nodes on the path are processed. The row's target lives in scratch memory: one
place for the processed distribution, two for residuals in turn; ``scale`` makes its total 1.

Shape letters: B batch, N nodes, V vocabulary, D deepest level, W codes, J columns of the neighbour
table.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from specmm.kernels.acceptance.distributions import LEAST, draw, process

SCRATCH = tl.constexpr(3)  # distributions a row


@triton.jit
def _borrowed(now, scale, token, own, table, codes, columns, offset, bound,
              FACTOR: tl.constexpr, NEAR: tl.constexpr, NEAR_BLOCK: tl.constexpr):  # fmt: skip
    """LANTERN's S of one token: the largest sum of the target over its nearest codes that stays
    within the bound.
    """
    j = tl.arange(0, NEAR_BLOCK)
    code = tl.zeros([NEAR_BLOCK], tl.int64) + (token - offset)
    live = (j < NEAR) & (code >= 0) & (code < codes)
    near = tl.load(table + code * columns + j, mask=live, other=0) + offset
    total = tl.cumsum(tl.load(now + near, mask=live, other=0.0) * scale, 0)
    limit = (bound - 1) * own if FACTOR else bound
    return tl.max(tl.where(live & (total <= limit), total, 0.0), 0)


@triton.jit
def _reject(now, out, scale, token, draft, V, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Store what is left of the target once ``token`` is rejected; returns its total."""
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        target = tl.load(now + v, mask=v < V, other=0.0) * scale
        if DRAWN:
            rest = tl.maximum(target - tl.load(draft + v, mask=v < V, other=0.0), 0.0)
        else:
            rest = tl.where(v == token, 0.0, target)
        tl.store(out + v, rest, mask=v < V)
        total += tl.sum(rest, 0)
    tl.debug_barrier()  # other threads of the program gather from it
    return total


@triton.jit
def walk(
    probs_ptr, tokens_ptr, parents_ptr, uniforms_ptr, drafts_ptr, table_ptr, scratch_ptr, path_ptr, kept_ptr, next_ptr,
    nodes, shapes, levels, V, codes, columns, offset, bound, temperature, top_k, top_p,
    LOGITS: tl.constexpr, GREEDY: tl.constexpr, TOP_P: tl.constexpr, TOP_P_FIRST: tl.constexpr,
    DRAWN: tl.constexpr, FACTOR: tl.constexpr, NEAR: tl.constexpr, NEAR_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's path, kept and next token: siblings tested in turn from the root down."""
    row = tl.program_id(0).to(tl.int64)
    parents, tokens, uniforms = (
        parents_ptr + row % shapes * nodes,
        tokens_ptr + row * nodes,
        uniforms_ptr + row * (nodes + 1),
    )
    probs, scratch = probs_ptr + row * nodes * V, scratch_ptr + row * SCRATCH * V
    now, scale = probs, tl.full([], 1.0, probs_ptr.dtype.element_ty)
    if LOGITS:
        process(probs, scratch, V, temperature, top_k, top_p, GREEDY, TOP_P, TOP_P_FIRST, BLOCK)
        now = scratch
    node, kept, turn = tl.full([], 0, tl.int32), tl.full([], 1, tl.int32), tl.full([], 0, tl.int32)
    tl.store(path_ptr + row * levels, 0)
    for n in range(1, nodes):
        if tl.load(parents + n).to(tl.int32) == node:
            token = tl.load(tokens + n)
            own = tl.load(now + token) * scale
            chance = own
            if NEAR > 0:
                chance += _borrowed(
                    now,
                    scale,
                    token,
                    own,
                    table_ptr,
                    codes,
                    columns,
                    offset,
                    bound,
                    FACTOR,
                    NEAR,
                    NEAR_BLOCK,
                )
            draft = drafts_ptr + (row * nodes + n) * V
            if DRAWN:
                chance = chance / tl.maximum(tl.load(draft + token), LEAST)
            if tl.load(uniforms + n) < chance:
                tl.store(path_ptr + row * levels + kept, n)
                node, kept = tl.full([], 0, tl.int32) + n, kept + 1
                now, scale = probs + n * V, tl.full([], 1.0, probs_ptr.dtype.element_ty)
                if LOGITS:
                    process(
                        now,
                        scratch,
                        V,
                        temperature,
                        top_k,
                        top_p,
                        GREEDY,
                        TOP_P,
                        TOP_P_FIRST,
                        BLOCK,
                    )
                    now = scratch
            else:
                out = scratch + (1 + turn) * V
                total = _reject(now, out, scale, token, draft, V, DRAWN, BLOCK)
                if total > 0:  # else the target stays as it is, which keeps the processed support
                    now, scale, turn = out, 1 / total, 1 - turn
    tl.store(kept_ptr + row, kept)
    tl.store(next_ptr + row, draw(now, tl.load(uniforms + nodes), V, BLOCK))
