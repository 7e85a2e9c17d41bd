"""Fused acceptance from the leaves up, in Triton: block and traversal verification, one program a
row.

The program walks the tree: down to a node's first child, which enters with its chance r; at a node
whose children are gone it throws the node's die; rejected, the node lowers its parent's
distribution and raises the parent's r, and the walk goes on with the next sibling. Lowered
distributions lie in scratch memory, one a level; ``scale`` makes their total 1.

Shape letters: B batch, N nodes, V vocabulary, D deepest level.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from specmm.kernels.acceptance.distributions import LEAST, draw, process


@triton.jit
def _at(values, place, index):
    """Element ``index`` of the register vector ``values``, whose places are ``place``."""
    return tl.sum(tl.where(place == index, values, 0), 0)


@triton.jit
def _lower(now, out, scale, r, token, draft, V, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Store (r p - q)+ of the distribution p = ``scale`` ``now`` in ``out`` (which may be ``now``);
    returns its total S.

    With S = 0 nothing is stored.
    """
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        total += tl.sum(_rest(now, scale, r, token, draft, v, V, DRAWN), 0)
    if total > 0:
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            tl.store(out + v, _rest(now, scale, r, token, draft, v, V, DRAWN), mask=v < V)
    tl.debug_barrier()  # other threads of the program gather from it
    return total


@triton.jit
def _rest(now, scale, r, token, draft, v, V, DRAWN: tl.constexpr):
    """(r p - q)+ of the tokens ``v`` [BLOCK]."""
    target = tl.load(now + v, mask=v < V, other=0.0) * scale * r
    if DRAWN:
        return tl.maximum(target - tl.load(draft + v, mask=v < V, other=0.0), 0.0)
    return tl.where(v == token, 0.0, target)  # r p <= 1, the point mass


@triton.jit
def _probs(probs, scratch, moved, place, node, depth, V):
    """Where the distribution of ``node``, at ``depth``, lies."""
    now = probs + node * V
    if _at(moved, place, node) > 0:
        now = scratch + depth * V
    return now


@triton.jit
def _chance(now, scale, r, token, draft, DRAWN: tl.constexpr):
    """What a child enters with: min(1, r p / q)."""
    chance = r * (tl.load(now + token) * scale)
    if DRAWN:
        chance = chance / tl.maximum(tl.load(draft + token), LEAST)
    return tl.minimum(chance, 1.0)


@triton.jit
def climb(
    probs_ptr, tokens_ptr, parents_ptr, uniforms_ptr, drafts_ptr, scratch_ptr, path_ptr, kept_ptr, next_ptr,
    nodes, shapes, levels, V, temperature, top_k, top_p,
    LOGITS: tl.constexpr, GREEDY: tl.constexpr, TOP_P: tl.constexpr, TOP_P_FIRST: tl.constexpr,
    DRAWN: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's path, kept and next token: nodes tested in post-order."""
    row = tl.program_id(0).to(tl.int64)
    parents, tokens, uniforms = (
        parents_ptr + row % shapes * nodes,
        tokens_ptr + row * nodes,
        uniforms_ptr + row * (nodes + 1),
    )
    probs, scratch, path = (
        probs_ptr + row * nodes * V,
        scratch_ptr + row * levels * V,
        path_ptr + row * levels,
    )
    drafts = drafts_ptr + row * nodes * V
    place = tl.arange(0, NODES)
    parent = tl.load(parents + place, mask=place < nodes, other=-1).to(tl.int32)
    reach = tl.full([NODES], 1.0, probs_ptr.dtype.element_ty)  # r of the nodes on the path
    scale = tl.full([NODES], 1.0, probs_ptr.dtype.element_ty)
    moved = tl.zeros([NODES], tl.int32)  # whether a node's distribution lies in scratch
    node, after, depth = (
        tl.full([], 0, tl.int32),
        tl.full([], 0, tl.int32),
        tl.full([], 0, tl.int32),
    )
    walking = tl.full([], 1, tl.int32)
    if LOGITS:
        process(probs, scratch, V, temperature, top_k, top_p, GREEDY, TOP_P, TOP_P_FIRST, BLOCK)
        moved = tl.where(place == 0, 1, moved)
    while walking > 0:
        r = _at(reach, place, node)
        child = tl.min(tl.where((parent == node) & (place > after), place, NODES), 0)
        if child < NODES:
            now = _probs(probs, scratch, moved, place, node, depth, V)
            share, draft = _at(scale, place, node), drafts + child * V
            reach = tl.where(
                place == child, _chance(now, share, r, tl.load(tokens + child), draft, DRAWN), reach
            )
            node, after, depth = child, child, depth + 1
            if LOGITS:
                process(probs + node * V, scratch + depth * V, V, temperature, top_k, top_p,
                         GREEDY, TOP_P, TOP_P_FIRST, BLOCK)  # fmt: skip
                moved = tl.where(place == node, 1, moved)
        else:
            kept = (node == 0) | (tl.load(uniforms + node) < r)
            walking = tl.where(kept, 0, 1)
            if not kept:
                up = _at(parent, place, node)
                now, out = (
                    _probs(probs, scratch, moved, place, up, depth - 1, V),
                    scratch + (depth - 1) * V,
                )
                before, draft = _at(reach, place, up), drafts + node * V
                share = _at(scale, place, up)
                total = _lower(
                    now, out, share, before, tl.load(tokens + node), draft, V, DRAWN, BLOCK
                )
                if (
                    total > 0
                ):  # else the distribution stays as it is, which keeps the processed support
                    scale = tl.where(place == up, 1 / total, scale)
                    moved = tl.where(place == up, 1, moved)
                raised = tl.where(before < 1, total / (total + 1 - before), 1.0)
                reach = tl.where(place == up, raised, reach)
                node, after, depth = up, node, depth - 1
    now = _probs(probs, scratch, moved, place, node, depth, V)
    tl.store(kept_ptr + row, depth + 1)
    tl.store(next_ptr + row, draw(now, tl.load(uniforms + nodes), V, BLOCK))
    while depth >= 0:
        tl.store(path + depth, node)
        node, depth = _at(parent, place, node), depth - 1
