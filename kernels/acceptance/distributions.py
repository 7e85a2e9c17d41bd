"""Distributions in Triton: the likeliest token, and sampling.

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
def argmax(row, V, BLOCK: tl.constexpr):
    """The first index of a row's largest value."""
    top = tl.full([], float("-inf"), row.dtype.element_ty)
    index = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < V, other=float("-inf"))
        best = tl.max(x, 0)
        if best > top:
            index = tl.min(tl.where(x == best, v, V), 0)
            top = best
    return index


@triton.jit
def draw(now, uniform, V, BLOCK: tl.constexpr):
    """A token drawn from ``now``, which need not sum to 1, by the inverse of its cumulative sum;
    never a token of zero mass.
    """
    total = tl.full([], 0.0, now.dtype.element_ty)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(now + v, mask=v < V, other=0.0), 0)
    threshold = uniform * total
    done = tl.zeros_like(total)
    token = tl.full([], 2**31 - 1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        mass = tl.load(now + v, mask=v < V, other=0.0)
        hit = (mass > 0) & (done + tl.cumsum(mass, 0) > threshold)
        token = tl.minimum(token, tl.min(tl.where(hit, v, 2**31 - 1), 0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0, v, 0), 0))
        done += tl.sum(mass, 0)
    return tl.minimum(token, last)
