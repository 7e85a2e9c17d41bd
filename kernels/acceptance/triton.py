"""Fused acceptance in Triton: from a round's laws (or logits) and uniforms to the verdict, one program a row.

Nodes are visited in ascending order, which is the walk from the root down with siblings by rank, since a node comes
after its parent: a child of the node reached so far is tested; accepted, it becomes the node reached; rejected, it
changes the target its later siblings face. Only the laws of nodes on the path are processed. The row's target lives
in scratch memory: one place for the processed law, two for residuals in turn; ``scale`` makes its total 1.

Shape letters: B batch, N nodes, V vocabulary, D deepest level, W codes, J columns of the neighbour table.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # tokens read at a time
WARPS = 8
LEAST = tl.constexpr(1.1754944e-38)  # a draft of zero mass divides by this


@triton.jit
def _key(x):
    """Integers in the order of the finite floats ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest(row, V, temperature, BLOCK: tl.constexpr):
    """The largest of a row of logits over ``temperature``, and the first place that has it."""
    top, place = tl.full([], float("-inf"), row.dtype.element_ty), tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < V, other=float("-inf")) / temperature
        best = tl.max(x, 0)
        if best > top:
            place = tl.min(tl.where(x == best, v, V), 0)
            top = best
    return top, place


@triton.jit
def _above(row, V, temperature, top, least, mark, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Count, or weight exp(x - top), of a row's logits whose key is at least ``least`` and above ``mark``."""
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < V, other=float("-inf")) / temperature
        counted = (v < V) & (_key(x) >= least) & (_key(x).to(tl.int64) > mark)
        total += tl.sum(tl.where(counted, tl.exp(x - top) if MASS else 1.0, 0.0), 0)
    return total


@triton.jit
def _threshold(row, V, temperature, top, least, bound, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key with at most ``bound`` above it, by bisection over the 2^32 keys."""
    low, high = tl.full([], -(2**31), tl.int64), tl.full([], 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = _above(row, V, temperature, top, least, middle, MASS, BLOCK) <= bound
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return high.to(tl.int32)


@triton.jit
def _process(
    row, out, V, temperature, top_k, top_p,
    GREEDY: tl.constexpr, TOP_P: tl.constexpr, TOP_P_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the law of a row of logits: temperature, top-k, top-p, softmax (:class:`specmm.processors.Processor`)."""
    top, place = _largest(row, V, temperature, BLOCK)
    least, total = tl.full([], -(2**31), tl.int32), tl.full([], 1.0, row.dtype.element_ty)
    if not GREEDY:
        everything = least
        if (top_k > 0) & (top_k < V):
            least = _threshold(row, V, temperature, top, everything, top_k - 1, False, BLOCK)
        if TOP_P:
            pool = everything if TOP_P_FIRST else least
            mass = _above(row, V, temperature, top, pool, -(2**31) - 1, True, BLOCK)
            least = tl.maximum(least, _threshold(row, V, temperature, top, pool, top_p * mass, True, BLOCK))
        total = _above(row, V, temperature, top, least, -(2**31) - 1, True, BLOCK)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        if GREEDY:
            law = (v == place).to(out.dtype.element_ty)
        else:
            x = tl.load(row + v, mask=v < V, other=float("-inf")) / temperature
            law = tl.where(_key(x) >= least, tl.exp(x - top) / total, 0.0)
        tl.store(out + v, law, mask=v < V)
    tl.debug_barrier()


@triton.jit
def _borrowed(now, scale, token, own, table, codes, columns, offset, bound,
              FACTOR: tl.constexpr, NEAR: tl.constexpr, NEAR_BLOCK: tl.constexpr):  # fmt: skip
    """LANTERN's S of one token: the largest sum of the target over its nearest codes that stays within the bound."""
    j = tl.arange(0, NEAR_BLOCK)
    code = tl.zeros([NEAR_BLOCK], tl.int64) + (token - offset)
    live = (j < NEAR) & (code >= 0) & (code < codes)
    near = tl.load(table + code * columns + j, mask=live, other=0) + offset
    total = tl.cumsum(tl.load(now + near, mask=live, other=0.0) * scale, 0)
    limit = (bound - 1) * own if FACTOR else bound
    return tl.max(tl.where(live & (total <= limit), total, 0.0), 0)


@triton.jit
def _borrowed_by(v, target, now, scale, table, codes, columns, offset, bound,
                 FACTOR: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """LANTERN's S of the tokens ``v`` [BLOCK], whose masses are ``target``."""
    code = v.to(tl.int64) - offset
    live = (code >= 0) & (code < codes)
    total, lent = tl.zeros_like(target), tl.zeros_like(target)
    limit = (bound - 1) * target if FACTOR else tl.zeros_like(target) + bound
    for j in range(NEAR):
        near = tl.load(table + code * columns + j, mask=live, other=0) + offset
        total += tl.load(now + near, mask=live, other=0.0) * scale
        lent = tl.where(live & (total <= limit), total, lent)
    return lent


@triton.jit
def _reject(now, out, scale, token, draft, V, table, codes, columns, offset, bound,
            DRAWN: tl.constexpr, FACTOR: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store what is left of the target once ``token`` is rejected; returns its total."""
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        target = tl.load(now + v, mask=v < V, other=0.0) * scale
        if DRAWN:
            kept = tl.load(draft + v, mask=v < V, other=0.0)
            if NEAR > 0:
                lent = _borrowed_by(v, target, now, scale, table, codes, columns, offset, bound, FACTOR, NEAR)
                kept = tl.minimum(kept, target + lent)
            rest = tl.maximum(target - kept, 0.0)
        else:
            rest = tl.where(v == token, 0.0, target)
        tl.store(out + v, rest, mask=v < V)
        total += tl.sum(rest, 0)
    tl.debug_barrier()  # other threads of the program gather from it
    return total


@triton.jit
def _draw(now, uniform, V, BLOCK: tl.constexpr):
    """A token of the law ``now`` of any total by the inverse of its cumulative sum; never one of zero mass."""
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(now + v, mask=v < V, other=0.0), 0)
    wanted, done = uniform * total, tl.zeros_like(total)
    found, last = tl.full([], 2**31 - 1, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        mass = tl.load(now + v, mask=v < V, other=0.0)
        hit = (mass > 0) & (done + tl.cumsum(mass, 0) > wanted)
        found = tl.minimum(found, tl.min(tl.where(hit, v, 2**31 - 1), 0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0, v, 0), 0))
        done += tl.sum(mass, 0)
    return tl.minimum(found, last)


@triton.jit
def _walk(
    laws_ptr, tokens_ptr, parents_ptr, dice_ptr, drafts_ptr, table_ptr, scratch_ptr, path_ptr, kept_ptr, next_ptr,
    nodes, shapes, levels, V, codes, columns, offset, bound, temperature, top_k, top_p,
    LOGITS: tl.constexpr, GREEDY: tl.constexpr, TOP_P: tl.constexpr, TOP_P_FIRST: tl.constexpr,
    DRAWN: tl.constexpr, FACTOR: tl.constexpr, NEAR: tl.constexpr, NEAR_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parents, tokens, dice = parents_ptr + row % shapes * nodes, tokens_ptr + row * nodes, dice_ptr + row * (nodes + 1)
    laws, scratch = laws_ptr + row * nodes * V, scratch_ptr + row * 3 * V
    now, scale = laws, tl.full([], 1.0, laws_ptr.dtype.element_ty)
    if LOGITS:
        _process(laws, scratch, V, temperature, top_k, top_p, GREEDY, TOP_P, TOP_P_FIRST, BLOCK)
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
                    now, scale, token, own, table_ptr, codes, columns, offset, bound, FACTOR, NEAR, NEAR_BLOCK
                )
            draft = drafts_ptr + (row * nodes + n) * V
            if DRAWN:
                chance = chance / tl.maximum(tl.load(draft + token), LEAST)
            if tl.load(dice + n) < chance:
                tl.store(path_ptr + row * levels + kept, n)
                node, kept = tl.full([], 0, tl.int32) + n, kept + 1
                now, scale = laws + n * V, tl.full([], 1.0, laws_ptr.dtype.element_ty)
                if LOGITS:
                    _process(now, scratch, V, temperature, top_k, top_p, GREEDY, TOP_P, TOP_P_FIRST, BLOCK)
                    now = scratch
            else:
                out = scratch + (1 + turn) * V
                total = _reject(
                    now, out, scale, token, draft, V, table_ptr, codes, columns, offset, bound,
                    DRAWN, FACTOR, NEAR, BLOCK,
                )  # fmt: skip
                if total > 0:  # else the target stays as it is, which keeps the processed support
                    now, scale, turn = out, 1 / total, 1 - turn
    tl.store(kept_ptr + row, kept)
    tl.store(next_ptr + row, _draw(now, tl.load(dice + nodes), V, BLOCK))


def accept(
    laws: Tensor,
    tokens: Tensor,
    parents: Tensor,
    dice: Tensor,
    depth: int,
    drafts: Tensor | None,
    table: Tensor | None,
    near: int,
    bound: float,
    factor: bool,
    offset: int,
    processing: list[float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, kept and next token; for the arguments see ``op.accept``."""
    batch, nodes, vocabulary = laws.shape
    path = parents.new_full((batch, depth + 1), -1)
    kept, following = parents.new_empty(batch), parents.new_empty(batch)
    temperature, top_k, top_p, top_p_first = processing or (1.0, 0, 1.0, False)
    codes, columns = (0, 0) if table is None else table.shape
    _walk[(batch,)](
        *(x.contiguous() for x in (laws, tokens, parents, dice)),
        *(x.contiguous() for x in (laws if drafts is None else drafts, parents if table is None else table)),
        *(laws.new_empty(batch, 3, vocabulary), path, kept, following),
        *(nodes, len(parents), depth + 1, vocabulary, codes, columns, offset, bound),
        *(max(temperature, 1e-5), float(top_k), top_p),
        LOGITS=processing is not None, GREEDY=temperature == 0, TOP_P=top_p < 1, TOP_P_FIRST=bool(top_p_first),
        DRAWN=drafts is not None, FACTOR=factor, NEAR=near, NEAR_BLOCK=triton.next_power_of_2(max(near, 1)),
        BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=WARPS,
    )  # fmt: skip
    return path, kept, following
