"""The k-th largest of a row by a full sort: the reference for tests of other implementations."""

from __future__ import annotations

from torch import Tensor


def kth_largest(x: Tensor, k: int) -> Tensor:
    """As ``specmm.kernels.top_k.kth_largest``."""
    return x.sort(dim=-1, descending=True).values[..., k - 1 : k]
