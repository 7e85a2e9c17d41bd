"""The k-th largest of a row, ``torch.ops.specmm.kth_largest``: the threshold of a top-k filter.

PyTorch's own ``topk`` searches and sorts the k largest on one multiprocessor, which for LlamaGen's
2000 of 16,384 takes as long as twenty layers' products. Shape letters: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.kernels.backend import backend

MOST = 32_768  # V that one program holds


@torch.library.custom_op("specmm::kth_largest", mutates_args=())
def kth_largest(x: Tensor, k: int) -> Tensor:
    """The ``k``-th largest of ``x`` [..., V], [..., 1]; NaN counts as the largest.

    Raises ``ValueError`` unless 1 <= k <= V.
    """
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"k must be in [1, {x.shape[-1]}], the size of a row, got {k}")
    if serves(x):
        from specmm.kernels.top_k.triton import kth_largest as fast

        return fast(x.contiguous(), k)
    return x.topk(k, dim=-1).values[..., -1:].contiguous()


@kth_largest.register_fake
def _(x: Tensor, k: int) -> Tensor:
    """Shape inference: [..., 1] of the same dtype."""
    return x.new_empty(*x.shape[:-1], 1)


def serves(x: Tensor) -> bool:
    """Whether the kernel runs for ``x`` [..., V]."""
    return x.dtype == torch.float32 and x.shape[-1] <= MOST and backend(x.device) == "triton"
