"""KV commit, ``torch.ops.specmm.kv_commit``: every row's accepted path moves after its committed
tokens, in all layers at once; and ``commit``, which caches call.

Shape letters: A arrays (keys and values of all layers), R rows, B rows of lengths (R a multiple of
B; row r takes length r % B), M moves, S slots, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.kernels.backend import backend


@torch.library.custom_op("specmm::kv_commit", mutates_args=("data",))
def kv_commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """Move slots ``first + path[b, i]``, i < ``kept[b]``, to slots ``lengths[b] + i`` of ``data``
    [A, R, S, H, D].

    ``path`` [B, M] int64 ascends in its first ``kept`` [B] nodes; ``lengths`` [B] int64 is not
    changed. ``data`` may have any strides except the last, so caches of [R, H, S, D] can be passed
    transposed. Raises ``ValueError`` on sizes that do not fit together.
    """
    _check(data, path, kept, lengths)
    if backend(data.device) == "triton":
        from specmm.kernels.kv_commit.triton import kv_commit as fast

        fast(data, path.contiguous(), kept.contiguous(), lengths.contiguous(), first)
    else:
        _indexed(data, path, kept, lengths, first)


@kv_commit.register_fake
def _(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """Shape inference: the operator returns nothing."""


def commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """:func:`kv_commit`, without the operator's overhead if PyTorch's operators do the work."""
    if backend(data.device) == "triton":
        kv_commit(data, path, kept, lengths, first)
    else:
        _indexed(data, path, kept, lengths, first)


def _check(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor) -> None:
    """Raise ``ValueError`` for sizes and strides that do not fit together."""
    if data.ndim != 5 or data.stride(-1) != 1 or data.shape[1] % len(path):
        raise ValueError(
            f"data must be [A, R, S, H, D] with R a multiple of the {len(path)} paths and a dense "
            f"last axis, got {list(data.shape)} with strides {list(data.stride())}"
        )
    if kept.shape != path.shape[:1] or lengths.shape != path.shape[:1]:
        raise ValueError(
            f"kept and lengths must be [B] for paths {list(path.shape)}, got {list(kept.shape)} "
            f"and {list(lengths.shape)}"
        )


def _indexed(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """KV commit by index operators. Every row moves M entries: instead of rejected entries it moves
    its first entry again, which stays in its slot if nothing is accepted.
    """
    order = torch.arange(path.shape[1], device=path.device)
    order = torch.where(order < kept[:, None], order, 0)  # [B, M]
    source = first + path.gather(1, order).clamp(min=0)
    destination = torch.where(kept[:, None] > 0, lengths[:, None] + order, source)
    rows, slots = data.shape[1:3]
    if rows > len(path):  # guidance branches keep the same nodes
        source = source.repeat(rows // len(path), 1)  # [R, M]
        destination = destination.repeat(rows // len(path), 1)
    if data.stride(1) != slots * data.stride(2):
        row = torch.arange(rows, device=path.device)[:, None]
        data[:, row, destination] = data[:, row, source]
        return
    if rows > 1:
        first_slot = torch.arange(0, rows * slots, slots, device=path.device)[:, None]
        source = source + first_slot
        destination = destination + first_slot
    flat = data.flatten(1, 2)  # two thirds of the time of indexing rows and slots
    source = source.flatten()
    # of some rows of a larger memory, index_select would copy all
    moved = flat.index_select(1, source) if data.is_contiguous() else flat[:, source]
    flat.index_copy_(1, destination.flatten(), moved)
