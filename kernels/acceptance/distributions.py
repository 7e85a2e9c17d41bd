"""Distributions in Triton: logits processed into one, and a token drawn from one.

Shape letters: V vocabulary.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(1.1754944e-38)  # a draft of zero mass divides by this


@triton.jit
def _key(x):
    """Integers in the order of the finite floats ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def argmax(row, V, temperature, BLOCK: tl.constexpr):
    """The largest of a row of logits over ``temperature``, and the first place that has it."""
    top = tl.full([], float("-inf"), row.dtype.element_ty)
    place = tl.full([], 0, tl.int32)
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
    """Count, or weight exp(x - top), of a row's logits whose key is at least ``least`` and above
    ``mark``.
    """
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
    low = tl.full([], -(2**31), tl.int64)
    high = tl.full([], 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = _above(row, V, temperature, top, least, middle, MASS, BLOCK) <= bound
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return high.to(tl.int32)


@triton.jit
def process(
    row, out, V, temperature, top_k, top_p,
    GREEDY: tl.constexpr, TOP_P: tl.constexpr, TOP_P_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the distribution of a row of logits: temperature, top-k, top-p, softmax
    (:class:`specmm.core.processors.Processor`).
    """
    top, place = argmax(row, V, temperature, BLOCK)
    least = tl.full([], -(2**31), tl.int32)
    total = tl.full([], 1.0, row.dtype.element_ty)
    if not GREEDY:
        everything = least
        if (top_k > 0) & (top_k < V):
            least = _threshold(row, V, temperature, top, everything, top_k - 1, False, BLOCK)
        if TOP_P:
            pool = everything if TOP_P_FIRST else least
            mass = _above(row, V, temperature, top, pool, -(2**31) - 1, True, BLOCK)
            nucleus = _threshold(row, V, temperature, top, pool, top_p * mass, True, BLOCK)
            least = tl.maximum(least, nucleus)
        total = _above(row, V, temperature, top, least, -(2**31) - 1, True, BLOCK)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        if GREEDY:
            probs = (v == place).to(out.dtype.element_ty)
        else:
            x = tl.load(row + v, mask=v < V, other=float("-inf")) / temperature
            probs = tl.where(_key(x) >= least, tl.exp(x - top) / total, 0.0)
        tl.store(out + v, probs, mask=v < V)
    tl.debug_barrier()


@triton.jit
def draw(now, uniform, V, BLOCK: tl.constexpr):
    """A token of the distribution ``now`` of any total by the inverse of its cumulative sum; never
    one of zero mass.
    """
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(now + v, mask=v < V, other=0.0), 0)
    wanted = uniform * total
    done = tl.zeros_like(total)
    found = tl.full([], 2**31 - 1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        mass = tl.load(now + v, mask=v < V, other=0.0)
        hit = (mass > 0) & (done + tl.cumsum(mass, 0) > wanted)
        found = tl.minimum(found, tl.min(tl.where(hit, v, 2**31 - 1), 0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0, v, 0), 0))
        done += tl.sum(mass, 0)
    return tl.minimum(found, last)
