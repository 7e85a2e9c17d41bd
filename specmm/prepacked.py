"""How weights lie in a CPU's memory, for products of a few rows. Values, shapes and names stay as
they are.

A draft tree is scored in one forward of a few rows, which is where PyTorch's products of weights as
they are loaded are slow: MKL's of float32 reads them across, oneDNN's of bfloat16 reorders all of
them at every call.

Shape letters: N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.dtypes import bfloat16_products

# of the products that weights are packed for; others are right, and as fast for all that we could
# measure
ROWS = 16
SMALL = 2**19  # entries of a float32 weight that stays in a core's cache
LONG = (
    64  # tokens a row from which oneDNN's float32 products are ahead of MKL's, for one row or many
)
MOST = 2**30  # weights of a network that are held twice
Network = TypeVar("Network", bound=nn.Module)


@torch.no_grad()
def lay_weights(network: Network, long: bool = False) -> Network:
    """``network``, the weights of its linear layers laid out for products of a few rows where they
    are on a CPU.

    float32: column by column, so that a product with Wᵀ reads memory in order (20-50% faster for 1
    to 18 rows while a weight stays in a core's cache; larger ones are left, 2 rows of them would be
    slower). bfloat16: a second copy in oneDNN's blocks, for which 9 rows of SmolLM2-135M cost 1.23
    times as much as one, not 1.56 times, and VAR's hundreds of rows 20-40% less (two cores with
    AMX); networks too large to be held twice are left as they are. A network that takes ``long``
    inputs, as VAR takes whole scales, holds float32 twice as well: from ``LONG`` tokens a row on
    its products are of oneDNN's blocks, 5-15% less for thousands of rows. Tokens decide, not rows:
    those products do not depend on the batch.

    A column-major weight is not contiguous, which safetensors asks for when a state dict is saved
    by hand.
    """
    layers = [
        m for m in network.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"
    ]
    few = sum(layer.weight.numel() for layer in layers) <= MOST
    for layer in layers:
        dtype = layer.weight.dtype
        if dtype == torch.float32 and layer.weight.numel() <= SMALL:
            layer.weight.data = layer.weight.data.t().contiguous().t()
        if few and _packs(dtype, long):
            # a module's parents hold it by reference: it must stay the same object
            layer.__class__ = PackedLinear
            again = cast(PackedLinear, layer)
            again.long = long
            again.pack()
    return network


def _packs(dtype: torch.dtype, long: bool) -> bool:
    """Whether this processor is faster with weights of ``dtype`` in oneDNN's blocks."""
    if dtype == torch.float32:
        return long and torch.backends.mkldnn.is_available()
    return dtype == torch.bfloat16 and bfloat16_products()


def product(layer: nn.Linear, x: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """``x`` [..., K] times the layer's weight, and a ``bias`` [N] in place of its own: [..., N].

    With ``gelu`` (tanh) after it, which oneDNN applies on a CPU to what is still in the cache. A
    compiler gets the plain operators, and the weight as it is.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return _plain(layer, x, bias, gelu)
    packed = layer.current(x, gelu) if isinstance(layer, PackedLinear) else None
    if packed is None and not (gelu and _fuses(layer, x)):
        return _plain(layer, x, bias, gelu)
    weight, behind = (
        layer.weight if packed is None else packed,
        ("gelu", "tanh") if gelu else ("none", ""),
    )
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, behind[0], [], behind[1])
    return found


def _plain(layer: nn.Linear, x: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    found = F.linear(x, layer.weight, bias)
    return F.gelu(found, approximate="tanh") if gelu else found


def _fuses(layer: nn.Linear, x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == layer.weight.dtype and _multiplies(x.dtype)


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of ``dtype`` on this processor: those of half precision need more
    than AVX2.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def state_of(weight: Tensor) -> tuple[int, int]:
    """Tells whether ``weight`` is what it was: another tensor, or one that was written to, has
    another.
    """
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a copy of its weight in oneDNN's blocks; without one, as
    any other.

    The copy follows the weight wherever PyTorch counts that it changed (optimizers,
    ``load_state_dict``, ``copy_``); writing to ``weight.data``, or to weights made in inference
    mode, goes uncounted: call :meth:`pack` then.
    """

    packed: Tensor | None
    long: bool  # whether it takes inputs long enough for a copy in float32
    of: tuple[int, int]  # where the weight lay and how often it had changed

    def pack(self) -> None:
        """Make the copy, where there is a kernel for it."""
        weight = self.weight.detach()
        ready = weight.device.type == "cpu" and _packs(weight.dtype, self.long)
        self.packed = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS) if ready else None
        )
        self.of = state_of(self.weight)

    def current(self, x: Tensor, gelu: bool) -> Tensor | None:
        """The copy, made anew if the weight is not what it was; None where there is none that pays
        for ``x``.
        """
        if self.packed is None:
            return None
        if x.dtype == torch.float32 and not gelu and (x.ndim < 2 or x.shape[-2] < LONG):
            return None
        weight = self.weight
        if self.of != state_of(weight):
            self.pack()
        return self.packed if x.dtype == weight.dtype else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return product(self, x, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Another device or dtype: the copy is made anew."""
        moved: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.pack()
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Without the copy, which cannot be copied or written: it is made anew."""
        return {
            name: value for name, value in self.__dict__.items() if name not in ("packed", "of")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.pack()
