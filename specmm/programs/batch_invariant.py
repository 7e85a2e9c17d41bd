"""Batch-invariant rounding on a CPU: a row has the same bits alone and in a batch.

MKL sums a row of a product in an order that depends on the number of rows, the threads and the
processor. oneDNN's order depends on none of them, except that a single row has an order of its own.
Within ``batch_invariant()``, in float32, products are oneDNN's, attention is padded to four
queries, and convolutions take one picture at a time. (Measured on two x86 with AVX-512, for 1 and 2
threads; tests/integration/test_batch_equal.py.) A product costs some 20 us more. Compiled programs
are unchanged: in them a row's bits depend on the number of rows, but not on the other rows'
contents.

Shape letters: M rows, K inputs and N outputs of a product; T queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

TILE = 4


class batch_invariant(TorchFunctionMode):
    """A block in which products, attention and convolutions of any model are batch-invariant."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        run: Callable[..., Any] = INSTEAD.get(func, func)
        return run(*args, **(kwargs or {}))


def any_invariant() -> bool:
    """Whether this is within a ``batch_invariant()`` block."""
    return any(isinstance(mode, batch_invariant) for mode in _get_current_function_mode_stack())


@contextmanager
def outside_batch_invariant() -> Iterator[None]:
    """A block in which every enclosing ``batch_invariant()`` is off."""
    if not any_invariant():
        yield
        return
    with torch._C.DisableTorchFunction():
        yield


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``input`` [..., K], as oneDNN sums it."""
    if not _concerned(input):
        return F.linear(input, weight, bias)
    return fused(input, weight, bias, "none", [], "")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *positional: Any,
    **options: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of ``query`` [..., T, D], padded to ``TILE`` queries."""
    queries = query.shape[-2]
    if queries < TILE and _concerned(query):
        more = (0, 0, 0, TILE - queries)
        query = F.pad(query, more)
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            # the queries added may attend everything
            attn_mask = F.pad(attn_mask, more, value=attn_mask.dtype == torch.bool)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask, *positional, **options)
    return output[..., :queries, :]


def fused(x: Tensor, weight: Tensor, *positional: Any) -> Tensor:
    """oneDNN's product of ``x`` [..., K], with or without activation; a single row is doubled."""
    if x.shape[:-1].numel() != 1 or not _concerned(x):
        return POINTWISE(x, weight, *positional)
    return POINTWISE(x.expand(2, *x.shape), weight, *positional)[0]


def convolution(input: Tensor, *positional: Any, **options: Any) -> Tensor:
    """``F.conv2d``, picture by picture: oneDNN uses another algorithm for one than for several."""
    if input.ndim < 4 or not _concerned(input):
        return F.conv2d(input, *positional, **options)
    parts = [F.conv2d(part.contiguous(), *positional, **options) for part in input.split(1)]
    return torch.cat([part.contiguous() for part in parts])


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether numbers of this ``dtype`` on this ``device`` are batch-invariant within a block."""
    on_cpu = dtype == torch.float32 and device.type == "cpu"
    return on_cpu and torch.backends.mkldnn.is_available()


def _concerned(x: Tensor) -> bool:
    return serves(x.dtype, x.device)


POINTWISE = torch.ops.mkldnn._linear_pointwise
INSTEAD: dict[object, Callable[..., Tensor]] = {  # with arguments of PyTorch's names
    F.linear: linear,
    F.scaled_dot_product_attention: attention,
    F.conv2d: convolution,
    POINTWISE: fused,
}
