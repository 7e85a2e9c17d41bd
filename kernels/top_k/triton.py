"""The k-th largest of a row in Triton, by bisection of its bits.

A program holds a row in registers. Floats are mapped to integers of the same order. The answer's
bits are determined one by one, the highest first, by counting the entries that are at least as
large: 32 counts for any k. Shape letters: V vocabulary.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LEAST, MOST = -(2**31), 2**31 - 1  # integers


@triton.jit
def _kth_largest(
    x_ptr, out_ptr, width, k, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store one row's ``k``-th largest number."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width, other=float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of negatives larger bits are less
    order = tl.where(x != x, MOST, order)  # NaN of either sign
    # the sign first: a step of half the range would not fit into an integer
    kth = tl.where(tl.sum((order >= 0).to(tl.int32)) >= k, 0, LEAST)
    for i in tl.static_range(31):
        larger = kth + (1 << (30 - i))
        kth = tl.where(tl.sum((order >= larger).to(tl.int32)) >= k, larger, kth)
    bits = tl.where(kth < 0, kth ^ 0x7FFFFFFF, kth)
    tl.store(out_ptr + row, bits.to(tl.float32, bitcast=True))


def kth_largest(x: Tensor, k: int) -> Tensor:
    """As ``specmm.kernels.top_k.kth_largest``, of contiguous float32 rows."""
    width = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], 1)
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 1024))
    options = dict(LEAST=LEAST, MOST=MOST, BLOCK=block, num_warps=warps)
    _kth_largest[(out.numel(),)](x, out, width, k, **options)
    return out
