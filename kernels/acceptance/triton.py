"""Fused acceptance in Triton, one program a row: from a round's distributions and uniforms to the
result.

``walk`` goes from the root down: recursive, point mass. ``climb`` goes from the leaves up: block
and traversal verification. ``follow`` takes the likeliest tokens. Nodes are numbered after their
parents and siblings by rank.

Shape letters: B batch, N nodes, V vocabulary, D deepest level.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specmm.kernels.acceptance.distributions import LEAST, argmax, draw

BLOCK = 2048  # tokens read at a time
WARPS = 8
SCRATCH = tl.constexpr(2)  # distributions a row of ``walk``: residuals, in turn


def accept(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    uniforms: Tensor,
    depth: int,
    drafts: Tensor | None,
    leaves_first: bool,
    greedy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, kept and next token; for the arguments see ``specmm.kernels.acceptance.accept``."""
    batch, nodes, vocabulary = probs.shape
    path = parents.new_full((batch, depth + 1), -1)
    results = path, parents.new_empty(batch), parents.new_empty(batch)
    inputs = [x.contiguous() for x in (probs, tokens, parents)]
    sizes = nodes, len(parents), depth + 1, vocabulary
    block = dict(BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=WARPS)
    if greedy:
        follow[(batch,)](*inputs, *results, *sizes, **block)
        return results
    inputs += [uniforms.contiguous(), probs if drafts is None else drafts.contiguous()]
    drawn = dict(DRAWN=drafts is not None, **block)
    if leaves_first:
        scratch = probs.new_empty(batch, depth + 1, vocabulary)
        every = triton.next_power_of_2(nodes)
        climb[(batch,)](*inputs, scratch, *results, *sizes, NODES=every, **drawn)
        return results
    scratch = probs.new_empty(batch, SCRATCH.value, vocabulary)
    walk[(batch,)](*inputs, scratch, *results, *sizes, **drawn)
    return results


@triton.jit
def follow(
    probs_ptr, tokens_ptr, parents_ptr, path_ptr, kept_ptr, next_ptr,
    nodes, shapes, levels, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's path, kept and next token: the likeliest token of each reached node decides."""
    row = tl.program_id(0).to(tl.int64)
    parents = parents_ptr + row % shapes * nodes
    tokens = tokens_ptr + row * nodes
    probs = probs_ptr + row * nodes * V
    node = tl.full([], 0, tl.int32)
    kept = tl.full([], 1, tl.int32)
    likeliest = argmax(probs, V, BLOCK)
    tl.store(path_ptr + row * levels, 0)
    for n in range(1, nodes):
        if (tl.load(parents + n).to(tl.int32) == node) & (tl.load(tokens + n) == likeliest):
            tl.store(path_ptr + row * levels + kept, n)
            node = tl.full([], 0, tl.int32) + n
            kept = kept + 1
            likeliest = argmax(probs + n * V, V, BLOCK)
    tl.store(kept_ptr + row, kept)
    tl.store(next_ptr + row, likeliest)


@triton.jit
def _at(values, order, index):
    """Element ``index`` of the register vector ``values``; ``order`` is 0, 1, … of its length."""
    return tl.sum(tl.where(order == index, values, 0), 0)


@triton.jit
def _residual(now, scale, token, draft, v, V, DRAWN: tl.constexpr):
    """(``scale`` ``now`` - q)+ of the tokens ``v`` [BLOCK]; a point mass removes its token."""
    target = tl.load(now + v, mask=v < V, other=0.0) * scale
    if DRAWN:
        return tl.maximum(target - tl.load(draft + v, mask=v < V, other=0.0), 0.0)
    return tl.where(v == token, 0.0, target)


@triton.jit
def _reject(now, out, scale, token, draft, V, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Store the target's residual after ``token`` is rejected; returns its total."""
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        residual = _residual(now, scale, token, draft, v, V, DRAWN)
        tl.store(out + v, residual, mask=v < V)
        total += tl.sum(residual, 0)
    tl.debug_barrier()  # other threads of the program gather from it
    return total


@triton.jit
def walk(
    probs_ptr, tokens_ptr, parents_ptr, uniforms_ptr, drafts_ptr, scratch_ptr,
    path_ptr, kept_ptr, next_ptr, nodes, shapes, levels, V,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's path, kept and next token: siblings are tested in turn from the root down.

    Nodes are visited in ascending order. Children of the deepest accepted node are tested: an
    accepted child becomes that node; a rejected child changes the target for its later siblings.
    ``scale`` makes the total of the target ``now`` 1.
    """
    row = tl.program_id(0).to(tl.int64)
    parents = parents_ptr + row % shapes * nodes
    tokens = tokens_ptr + row * nodes
    uniforms = uniforms_ptr + row * (nodes + 1)
    probs = probs_ptr + row * nodes * V
    scratch = scratch_ptr + row * SCRATCH * V
    now = probs
    scale = tl.full([], 1.0, probs_ptr.dtype.element_ty)
    node = tl.full([], 0, tl.int32)
    kept = tl.full([], 1, tl.int32)
    turn = tl.full([], 0, tl.int32)
    tl.store(path_ptr + row * levels, 0)
    for n in range(1, nodes):
        if tl.load(parents + n).to(tl.int32) == node:
            token = tl.load(tokens + n)
            chance = tl.load(now + token) * scale
            draft = drafts_ptr + (row * nodes + n) * V
            if DRAWN:
                chance = chance / tl.maximum(tl.load(draft + token), LEAST)
            if tl.load(uniforms + n) < chance:
                tl.store(path_ptr + row * levels + kept, n)
                node = tl.full([], 0, tl.int32) + n
                kept = kept + 1
                now = probs + n * V
                scale = tl.full([], 1.0, probs_ptr.dtype.element_ty)
            else:
                out = scratch + turn * V
                total = _reject(now, out, scale, token, draft, V, DRAWN, BLOCK)
                if total > 0:  # else the target does not change
                    now = out
                    scale = 1 / total
                    turn = 1 - turn
    tl.store(kept_ptr + row, kept)
    tl.store(next_ptr + row, draw(now, tl.load(uniforms + nodes), V, BLOCK))


@triton.jit
def _lower(now, out, scale, token, draft, V, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Store (``scale`` ``now`` - q)+ in ``out``, which may be ``now``; returns its total S.

    With S = 0 nothing is stored.
    """
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        total += tl.sum(_residual(now, scale, token, draft, v, V, DRAWN), 0)
    if total > 0:
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            tl.store(out + v, _residual(now, scale, token, draft, v, V, DRAWN), mask=v < V)
    tl.debug_barrier()  # other threads of the program gather from it
    return total


@triton.jit
def _probs(probs, scratch, moved, order, node, depth, V):
    """Address of the distribution of ``node``, at ``depth``."""
    now = probs + node * V
    if _at(moved, order, node) > 0:
        now = scratch + depth * V
    return now


@triton.jit
def _chance(now, scale, r, token, draft, DRAWN: tl.constexpr):
    """A child's initial chance: min(1, r p / q)."""
    chance = r * (tl.load(now + token) * scale)
    if DRAWN:
        chance = chance / tl.maximum(tl.load(draft + token), LEAST)
    return tl.minimum(chance, 1.0)


@triton.jit
def climb(
    probs_ptr, tokens_ptr, parents_ptr, uniforms_ptr, drafts_ptr, scratch_ptr,
    path_ptr, kept_ptr, next_ptr, nodes, shapes, levels, V,
    NODES: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's path, kept and next token: nodes are tested in post-order.

    The walk goes down to a node's first child, which starts with its chance r. A node whose
    children are all rejected is tested by its uniform. If rejected, it lowers its parent's
    distribution and raises the parent's r, and the next sibling follows. Lowered distributions are
    in scratch memory, one a level.
    """
    row = tl.program_id(0).to(tl.int64)
    parents = parents_ptr + row % shapes * nodes
    tokens = tokens_ptr + row * nodes
    uniforms = uniforms_ptr + row * (nodes + 1)
    probs = probs_ptr + row * nodes * V
    scratch = scratch_ptr + row * levels * V
    drafts = drafts_ptr + row * nodes * V
    order = tl.arange(0, NODES)
    parent = tl.load(parents + order, mask=order < nodes, other=-1).to(tl.int32)
    reach = tl.full([NODES], 1.0, probs_ptr.dtype.element_ty)  # r of the nodes on the path
    scale = tl.full([NODES], 1.0, probs_ptr.dtype.element_ty)  # makes a distribution's total 1
    moved = tl.zeros([NODES], tl.int32)  # whether a node's distribution lies in scratch
    node = tl.full([], 0, tl.int32)
    after = tl.full([], 0, tl.int32)
    depth = tl.full([], 0, tl.int32)
    walking = tl.full([], 1, tl.int32)
    while walking > 0:
        r = _at(reach, order, node)
        child = tl.min(tl.where((parent == node) & (order > after), order, NODES), 0)
        if child < NODES:
            now = _probs(probs, scratch, moved, order, node, depth, V)
            share = _at(scale, order, node)
            entered = _chance(now, share, r, tl.load(tokens + child), drafts + child * V, DRAWN)
            reach = tl.where(order == child, entered, reach)
            node = child
            after = child
            depth = depth + 1
        else:
            kept = (node == 0) | (tl.load(uniforms + node) < r)
            walking = tl.where(kept, 0, 1)
            if not kept:
                up = _at(parent, order, node)
                now = _probs(probs, scratch, moved, order, up, depth - 1, V)
                out = scratch + (depth - 1) * V
                before = _at(reach, order, up)
                share = _at(scale, order, up) * before
                token = tl.load(tokens + node)
                total = _lower(now, out, share, token, drafts + node * V, V, DRAWN, BLOCK)
                if total > 0:  # else it does not change
                    scale = tl.where(order == up, 1 / total, scale)
                    moved = tl.where(order == up, 1, moved)
                raised = tl.where(before < 1, total / (total + 1 - before), 1.0)
                reach = tl.where(order == up, raised, reach)
                after = node
                node = up
                depth = depth - 1
    now = _probs(probs, scratch, moved, order, node, depth, V)
    tl.store(kept_ptr + row, depth + 1)
    tl.store(next_ptr + row, draw(now, tl.load(uniforms + nodes), V, BLOCK))
    while depth >= 0:
        tl.store(path_ptr + row * levels + depth, node)
        node = _at(parent, order, node)
        depth = depth - 1
