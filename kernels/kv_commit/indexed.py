"""KV commit by PyTorch's index operators: for CPUs, and where Triton does not run.

Every row moves M entries, whatever it accepted; those not kept are written back to where they are.
Shape letters: A arrays, R rows, B rows of lengths, M moves, S slots, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_commit(data: Tensor, path: Tensor, kept: Tensor, lengths: Tensor, first: int) -> None:
    """As ``op.kv_commit``, in place."""
    order = torch.arange(path.shape[1], device=path.device)
    source = first + path.clamp(min=0)  # [B, M]
    wanted = torch.where(order < kept[:, None], lengths[:, None] + order, source)
    rows, slots = data.shape[1:3]
    if rows > len(path):  # guidance branches keep the same nodes
        source, wanted = (
            places.repeat(rows // len(path), 1) for places in (source, wanted)
        )  # [R, M]
    if not data.is_contiguous():
        each = torch.arange(rows, device=path.device)[:, None]
        data[:, each, wanted] = data[:, each, source]
        return
    if rows > 1:
        first_slot = torch.arange(0, rows * slots, slots, device=path.device)[:, None]
        source, wanted = source + first_slot, wanted + first_slot
    flat = data.flatten(1, 2)  # two thirds of the time
    flat.index_copy_(1, wanted.flatten(), flat.index_select(1, source.flatten()))
