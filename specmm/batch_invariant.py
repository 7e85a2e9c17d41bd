"""Rounding on a CPU that does not depend on the batch: a row has the same bits alone and among
others.

MKL sums a row of a product in an order that depends on how many rows there are, on the threads and
on the processor; oneDNN's order depends on none of them, except that a lone row has its own. Within
``batch_invariant()`` products are oneDNN's, PyTorch's attention is filled up to four queries, and
convolutions take one picture at a time (float32; found on two kinds of x86 with AVX-512 for 1 and 2
threads, tests/integration/test_batch_equal.py). A product costs some 20 us more.

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


class batch_invariant(TorchFunctionMode):
    """Compute what is within the block so, whichever model computes it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        run: Callable[..., Any] = INSTEAD.get(func, func)
        return run(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``x`` [..., K], as oneDNN sums it."""
    return fused(x, weight, bias, "none", [], "") if _concerned(x) else F.linear(x, weight, bias)


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *given: Any, **options: Any
) -> Tensor:
    """``F.scaled_dot_product_attention`` of ``q`` [..., T, D]; fewer than ``TILE`` queries are
    filled up.
    """
    queries = q.shape[-2]
    if queries >= TILE or not _concerned(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, *given, **options)
    more = (0, 0, 0, TILE - queries)
    if attn_mask is not None and attn_mask.shape[-2] > 1:
        attn_mask = F.pad(
            attn_mask, more, value=attn_mask.dtype == torch.bool
        )  # the new ones may attend everything
    return F.scaled_dot_product_attention(F.pad(q, more), k, v, attn_mask, *given, **options)[
        ..., :queries, :
    ]


def fused(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    """oneDNN's product of ``x`` [..., K], with an activation perhaps; a lone row goes in twice."""
    if x.shape[:-1].numel() != 1 or not _concerned(x):
        return POINTWISE(x, weight, *given)
    return POINTWISE(x.expand(2, *x.shape), weight, *given)[0]


def convolution(x: Tensor, *given: Any, **options: Any) -> Tensor:
    """``F.conv2d``, picture by picture: oneDNN takes another algorithm for one than for several."""
    if x.ndim < 4 or not _concerned(x):
        return F.conv2d(x, *given, **options)
    return torch.cat(
        [F.conv2d(part.contiguous(), *given, **options).contiguous() for part in x.split(1)]
    )


def _concerned(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available()
    )


POINTWISE = torch.ops.mkldnn._linear_pointwise
INSTEAD: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    F.scaled_dot_product_attention: attention,
    F.conv2d: convolution,
    POINTWISE: fused,
}
