"""KV commit in Triton: all layers in one launch, no host in between.

A program moves a slice of one row of one array, entry after entry. A path ascends, so an entry
never moves to a slot that is still to be read, also where the tree lies right after the committed
tokens.

Shape letters: A arrays, R rows, B rows of lengths, M moves, S slots, H heads, D head width.
"""

# Triton's functions take pointers and have no types to speak of
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of an entry a program moves


@triton.jit
def _move(
    data_ptr, path_ptr, kept_ptr, lengths_ptr, first, rows, batch, moves, heads,
    at_array, at_row, at_slot, at_head, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move one block of the accepted entries of one row in one array."""
    array = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = data_ptr + array * at_array + row * at_row + (e // D).to(tl.int64) * at_head + e % D
    length = tl.load(lengths_ptr + row % batch)
    for i in range(0, tl.load(kept_ptr + row % batch).to(tl.int32)):
        node = tl.load(path_ptr + row % batch * moves + i)
        entry = tl.load(base + (first + node) * at_slot, mask=e < heads * D)
        tl.store(base + (length + i) * at_slot, entry, mask=e < heads * D)


def kv_commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """As ``specmm.kernels.kv_commit.kv_commit``, in place."""
    arrays, rows, _, heads, width = data.shape
    block = min(BLOCK, triton.next_power_of_2(heads * width))
    sizes = first, rows, *path.shape, heads, *data.stride()[:4]
    grid = arrays * rows, triton.cdiv(heads * width, block)
    _move[grid](data, path, kept, lengths, *sizes, D=width, BLOCK=block)
