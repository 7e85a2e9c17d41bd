"""Rounding on a CPU that does not depend on the batch: a row has the same bits alone and among others.

MKL sums a row of a product in one order, but for the last rows of a block of fewer than four, and so does PyTorch's
attention with its queries. Within ``steady()`` products and attentions are filled up to such blocks, and convolutions
take one picture at a time (float32; found on x86 for 1 and 2 threads, tests/integration/test_batch_equal.py). It costs
some microseconds an operation.

Shape letters: M rows, K inputs and N outputs of a product; T queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TILE = 4


class steady(TorchFunctionMode):
    """Fill up what is computed within the block, whichever model computes it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        run: Callable[..., Any] = INSTEAD.get(func, func)
        return run(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``x`` [..., K]; M is filled up to a multiple of ``TILE``."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % TILE if _concerned(x) else 0
    y = F.linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias)
    return y[: len(rows)].view(*x.shape[:-1], len(weight))


def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *given: Any, **options: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` of ``q`` [..., T, D]; fewer than ``TILE`` queries are filled up."""
    queries = q.shape[-2]
    if queries >= TILE or not _concerned(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, *given, **options)
    more = (0, 0, 0, TILE - queries)
    if attn_mask is not None and attn_mask.shape[-2] > 1:
        attn_mask = F.pad(attn_mask, more, value=attn_mask.dtype == torch.bool)  # the new ones may attend everything
    return F.scaled_dot_product_attention(F.pad(q, more), k, v, attn_mask, *given, **options)[..., :queries, :]


def fused(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    """oneDNN's product with an activation, whose only odd case is a lone row."""
    if len(x.reshape(-1, x.shape[-1])) > 1 or not _concerned(x):
        return POINTWISE(x, weight, *given)
    return POINTWISE(torch.cat([x, x]), weight, *given)[: len(x)]


def convolution(x: Tensor, *given: Any, **options: Any) -> Tensor:
    """``F.conv2d``, picture by picture: oneDNN takes another algorithm for one than for several."""
    if x.ndim < 4 or not _concerned(x):
        return F.conv2d(x, *given, **options)
    return torch.cat([F.conv2d(part.contiguous(), *given, **options).contiguous() for part in x.split(1)])


def _concerned(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


POINTWISE = torch.ops.mkldnn._linear_pointwise
INSTEAD: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    F.scaled_dot_product_attention: attention,
    F.conv2d: convolution,
    POINTWISE: fused,
}
