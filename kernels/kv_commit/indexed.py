"""KV commit by PyTorch's index operators: for CPUs, and where Triton does not run.

Every row moves M entries, whatever it accepted; those not kept are written back to where they are. Shape letters:
A arrays, R rows, B rows of lengths, M moves, S slots, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """As ``op.kv_commit``, in place."""
    order = torch.arange(path.shape[1], device=path.device)
    source = first + path.clamp(min=0)  # [B, M]
    wanted = torch.where(order < kept[:, None], lengths[:, None] + order, source)
    repeats, rows = (data.shape[1] // len(path), 1), torch.arange(data.shape[1], device=path.device)[:, None]
    source, wanted = source.repeat(repeats), wanted.repeat(repeats)  # [R, M]
    if data.is_contiguous():  # two thirds of the time
        flat, first_slot = data.flatten(1, 2), rows * data.shape[2]
        flat.index_copy_(1, (wanted + first_slot).flatten(), flat.index_select(1, (source + first_slot).flatten()))
    else:
        data[:, rows, wanted] = data[:, rows, source]
