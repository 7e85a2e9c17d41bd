"""KV commit, one entry at a time: the reference for tests of the other implementations."""

from __future__ import annotations

from torch import Tensor


def kv_commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """As ``specmm.kernels.kv_commit.kv_commit``, in place."""
    for array in data:
        for r, row in enumerate(array):
            b = r % len(path)
            for i in range(int(kept[b])):
                row[int(lengths[b]) + i] = row[first + int(path[b, i])].clone()
