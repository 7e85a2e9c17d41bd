"""``torch.ops.specmm.kv_commit`` and the function caches call.

Shape letters: A arrays (keys and values of all layers), R rows, B rows of lengths (R a multiple of
B; row r takes length r % B), M moves, S slots, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.kernels.backend import backend
from specmm.kernels.kv_commit import indexed


@torch.library.custom_op("specmm::kv_commit", mutates_args=("data",))
def kv_commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """Move slots ``first + path[b, i]``, i < ``kept[b]``, to slots ``lengths[b] + i`` of ``data``
    [A, R, S, H, D].

    ``path`` [B, M] int64 ascends in its first ``kept`` [B] nodes; ``lengths`` [B] int64 is not
    changed. ``data`` may have any strides but the last, so that caches of [R, H, S, D] come
    transposed. Raises ``ValueError`` on sizes that do not fit together.
    """
    check(data, path, kept, lengths)
    if backend(data.device) == "triton":
        from specmm.kernels.kv_commit.triton import kv_commit as fast

        fast(data, path.contiguous(), kept.contiguous(), lengths.contiguous(), first)
    else:
        indexed.kv_commit(data, path, kept, lengths, first)


@kv_commit.register_fake
def _(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """Nothing is returned."""


def check(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor) -> None:
    """Raise ``ValueError`` when the arguments of ``kv_commit`` do not fit together."""
    if data.ndim != 5 or data.stride(-1) != 1 or data.shape[1] % len(path):
        raise ValueError(
            f"data must be [A, R, S, H, D] with R a multiple of the {len(path)} paths and a dense last axis, "
            f"got {list(data.shape)} with strides {list(data.stride())}"
        )
    if kept.shape != path.shape[:1] or lengths.shape != path.shape[:1]:
        raise ValueError(
            f"kept and lengths must be [B] for paths {list(path.shape)}, got {list(kept.shape)} and "
            f"{list(lengths.shape)}"
        )


def commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """:func:`kv_commit`, without the operator's wrapping where PyTorch's own operators do the work."""
    if backend(data.device) == "triton":
        kv_commit(data, path, kept, lengths, first)
    else:
        indexed.kv_commit(data, path, kept, lengths, first)
