"""Chooses the fastest dtype and device of this machine, and prepacks weights for small products.

A draft tree is scored in one forward of a few rows, for which PyTorch's products on a CPU are slow
with weights in their loaded layout: MKL (float32) reads them across rows, and oneDNN (bfloat16)
reorders them at every call. :func:`prepack` stores them in the layout that these products read.
Values, shapes and names do not change.

Shape letters: N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

import functools
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specmm.core.derived import Derived, in_a_call
from specmm.extending.kinds import either
from specmm.extending.registry import unknown

DTYPES = ("auto", "float32", "bfloat16", "float16")
LARGE = 50_000_000  # parameters: their float32 weights no longer fit into a processor's caches
# Rows of the products that weights are packed for. Products of other numbers of rows are right,
# too, and no slower as far as we could measure.
ROWS = 16
SMALL = 2**19  # entries of a float32 weight that fits into a core's cache
LONG = 64  # tokens a row from which oneDNN's float32 products are faster than MKL's
MOST = 2**30  # weights of a network that may be stored twice
Network = TypeVar("Network", bound=nn.Module)


def choose_dtype(
    parameters: int = 0, long: bool = False, device: torch.device | str = "cpu"
) -> torch.dtype:
    """The dtype in which a step is fastest on ``device``, for a model of ``parameters`` weights.

    ``long`` steps have hundreds of rows. GPUs without bfloat16 get float32: float16 must be chosen
    by name, since models trained in bfloat16 may overflow in it.

    On a CPU bfloat16 pays if a step is bound by reading the weights; for smaller models its kernels
    cost more per call than float32's (pocket/llamagen on two cores with AMX: 4.9 ms a step against
    2.9 ms). Long steps are bound by arithmetic, which only AMX speeds up: on a Xeon with AMX
    disabled, bfloat16 products of 16 rows or more take 1.3 to 1.7 times as long as float32's (1024
    x 4096), and VAR-d16 takes 4.1 s a picture instead of 3.3.
    """
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if gpu_has_bfloat16() else torch.float32
    kernels = bfloat16_products() and (not long or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if kernels and parameters >= LARGE else torch.float32


@functools.cache  # asked at every product of a packed layer
def bfloat16_products() -> bool:
    """Whether oneDNN multiplies in bfloat16 here (``ONEDNN_MAX_CPU_ISA`` may disable it)."""
    mkldnn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(mkldnn and torch.cpu._is_avx512_bf16_supported())


def gpu_has_bfloat16() -> bool:
    """Whether the current GPU computes in bfloat16; others emulate it, slower than float32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def is_nearly_full(device: torch.device, share: float) -> bool:
    """Whether less than a ``share`` of a GPU's memory is free even after PyTorch has returned its
    cached memory; always False for a CPU.
    """
    if device.type != "cuda":
        return False
    for _ in range(2):
        free, total = torch.cuda.mem_get_info(device)
        if free >= share * total:
            return False
        torch.cuda.empty_cache()
    return True


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a ``dtype`` without "torch."."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype called ``name``, None for "auto"; raises ``ValueError`` with a suggestion."""
    if name is None or (isinstance(name, torch.dtype) and name.is_floating_point):
        return name
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return None if name == "auto" else getattr(torch, str(name))


def choose_device() -> torch.device:
    """The GPU if PyTorch finds one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def named_device(name: str | torch.device | None) -> torch.device:
    """The device called ``name``, or (for "auto" and None) this machine's best; raises
    ``ValueError`` if this machine lacks it or its driver.
    """
    if name is None or name == "auto":
        return choose_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        raise ValueError(
            f"device must be one of this machine's, such as cpu, got {name!r}"
        ) from error
    return device


def check_holds_numbers(network: nn.Module, name: str) -> None:
    """Raise ``ValueError`` for a ``network``, of the model ``name``, on the meta device."""
    if next(network.parameters()).is_meta:
        raise ValueError(
            f"{name} must have weights on a device, got none there (device meta); load them, "
            "or leave at least its first layer where it runs (device_map)"
        )


def check_multiplies(network: nn.Module, name: str) -> None:
    """Raise ``ValueError`` for layers of PyTorch's ``quantize_dynamic`` in a ``network`` of the
    model ``name``: they scale their inputs by the largest one of a forward, drafts included, so no
    run could be exact.
    """
    for path, module in network.named_modules():
        if callable(getattr(module, "weight", None)):
            raise ValueError(
                f"{name} must have layers whose weights are tensors, got a quantised "
                f"{type(module).__name__} at {path}, whose results depend on the drafts beside a "
                "token; load it in bfloat16 instead"
            )


@dataclass(frozen=True)
class Place:
    """A model's device (None: this machine's best) and dtype (None: the device's fastest)."""

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    @staticmethod
    def named(
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: object = None,
    ) -> Place:
        """The place of these names; ``torch_dtype`` is another name of ``dtype``.

        Raises ``ValueError`` for a device that this machine lacks, for a device together with a
        ``device_map``, and for an unknown dtype.
        """
        if device_map is not None and device not in (None, "auto"):
            raise ValueError(
                f"give device or device_map, not both, got {str(device)!r} and {device_map!r}"
            )
        named: torch.dtype | str | None = either("dtype", dtype, "torch_dtype", torch_dtype)
        return Place(named_device(device), named_dtype(named))

    @property
    def where(self) -> torch.device:
        """The device, chosen if None."""
        return named_device(self.device)


@torch.no_grad()
def prepack(network: Network, long: bool = False) -> Network:
    """``network`` with the weights of its linear layers, if on a CPU, stored for products of a few
    rows.

    float32: by column, so that a product with Wᵀ reads memory in order. This is 20-50% faster for 1
    to 18 rows while a weight fits into a core's cache; larger weights are left, since products of 2
    rows would be slower. Such a weight is not contiguous, which safetensors requires of a state
    dict saved by hand.

    bfloat16: a second copy in oneDNN's blocks. With it 9 rows of SmolLM2-135M cost 1.23 times as
    much as one instead of 1.56 times, and VAR's hundreds of rows 20-40% less (two cores with AMX).
    Networks of more than ``MOST`` weights are not copied.

    A network with ``long`` inputs, such as VAR's whole scales, gets the copy in float32, too: from
    ``LONG`` tokens a row on, its products are oneDNN's, 5-15% faster for thousands of rows.
    Tokens decide and not rows, so that products do not depend on the batch.
    """
    linear = [module for module in network.modules() if type(module) is nn.Linear]
    plain = [layer for layer in linear if type(layer.weight) is nn.Parameter]  # not quantised
    layers = [layer for layer in plain if layer.weight.device.type == "cpu"]
    few = sum(layer.weight.numel() for layer in layers) <= MOST
    for layer in layers:
        dtype = layer.weight.dtype
        if dtype == torch.float32 and layer.weight.numel() <= SMALL:
            layer.weight.data = layer.weight.data.t().contiguous().t()
        if few and _packs(dtype, long):
            # a module's parents hold it by reference: it must stay the same object
            layer.__class__ = PackedLinear
            cast(PackedLinear, layer).pack(long)
    return network


def contiguous_state(network: nn.Module) -> dict[str, Tensor]:
    """The weights of ``network`` for saving: packed weights made contiguous, tied weights tied."""
    copies: dict[int, Tensor] = {}
    return {
        name: copies.setdefault(weight.data_ptr(), weight.contiguous())
        for name, weight in network.state_dict().items()
    }


def _packs(dtype: torch.dtype, long: bool) -> bool:
    """Whether this processor is faster with weights of ``dtype`` in oneDNN's blocks."""
    if dtype == torch.float32:
        return long and torch.backends.mkldnn.is_available()
    return dtype == torch.bfloat16 and bfloat16_products()


class _CuDNN:
    """How many blocks switch cuDNN's attention off, and whether it was on before the first."""

    lock = threading.Lock()
    unwanted = 0
    before = True


@contextmanager
def attention_of_any_length() -> Iterator[None]:
    """Within the block, and in concurrent ones, PyTorch's attention does not use cuDNN's.

    PyTorch prefers cuDNN's on Hopper GPUs. But that plans for each new length, 40 ms on an H200,
    where a step of an 8 B model takes 9 ms and every step has a new length; and it fails for masks
    at odd addresses.
    """
    with _CuDNN.lock:
        if not _CuDNN.unwanted:
            _CuDNN.before = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _CuDNN.unwanted += 1
    try:
        yield
    finally:
        with _CuDNN.lock:
            _CuDNN.unwanted -= 1
            if not _CuDNN.unwanted:
                torch.backends.cuda.enable_cudnn_sdp(_CuDNN.before)


def product(layer: nn.Linear, x: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """``x`` [..., K] times the layer's weight, plus ``bias`` [N] instead of its own: [..., N].

    With ``gelu`` a GELU (tanh) follows; on a CPU oneDNN applies it while the product is in the
    cache. Compilers see plain operators and the unpacked weight. Hooks and adapters run.
    """
    if not _is_others(layer):
        return _multiplied(layer, x, bias, gelu)
    output: Tensor = layer(x)
    if bias is not layer.bias:
        output = output + (0 if bias is None else bias) - (0 if layer.bias is None else layer.bias)
    return F.gelu(output, approximate="tanh") if gelu else output


def _multiplied(layer: nn.Linear, x: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """:func:`product` of a plain layer: by oneDNN, prepacked or fused, if that is faster."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return _plain(layer, x, bias, gelu)
    packed = layer.current(x, gelu) if isinstance(layer, PackedLinear) else None
    if packed is None and not (gelu and _fuses(layer, x)):
        return _plain(layer, x, bias, gelu)
    weight = layer.weight if packed is None else packed
    activation, variant = ("gelu", "tanh") if gelu else ("none", "")
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], variant)
    return output


def _is_others(layer: nn.Module) -> bool:
    """Whether ``layer`` is more than a product: an adapter, or has hooks or a replaced forward."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) not in (nn.Linear, PackedLinear) or bool(hooks) or "forward" in vars(layer)


def _plain(layer: nn.Linear, x: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    output = F.linear(x, layer.weight, bias)
    return F.gelu(output, approximate="tanh") if gelu else output


def _fuses(layer: nn.Linear, x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == layer.weight.dtype and _multiplies(x.dtype)


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of ``dtype`` here: half precision needs more than AVX2."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a copy of its weight in oneDNN's blocks, if it has one.

    The copy is used within a call (:func:`specmm.core.derived.one_call`), and remade if the weight
    has changed; outside it is a plain linear layer.
    """

    packed: Derived[Tensor | None]
    packs: bool  # whether there was a kernel for a copy: asked at every product
    long: bool  # whether it takes inputs long enough for a copy in float32

    def pack(self, long: bool) -> None:
        """Make the copy, if there is a kernel for it."""
        self.long, self.packed = long, Derived()
        self.packs = self._has_kernel()
        if self.packs:
            self.packed.of((self.weight,), self._reordered)

    def _has_kernel(self) -> bool:
        return self.weight.device.type == "cpu" and _packs(self.weight.dtype, self.long)

    def _reordered(self) -> Tensor | None:
        if not self._has_kernel():  # a weight was put in its place
            return None
        weight = self.weight.detach().contiguous()
        reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        return reordered

    def current(self, x: Tensor, gelu: bool) -> Tensor | None:
        """An up-to-date prepacked copy of the weight; None if ``x`` does not need it.

        Short float32 inputs use it only with a fused ``gelu``, which only its kernel has.
        """
        weight = self.weight
        if not self.packs or not in_a_call() or x.dtype != weight.dtype:
            return None
        if x.dtype == torch.float32 and not gelu and (x.ndim < 2 or x.shape[-2] < LONG):
            return None
        return self.packed.of((weight,), self._reordered)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return _multiplied(self, x, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device or dtype and make the copy again."""
        moved: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.pack(self.long)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """The state without the packed copy, which cannot be copied or saved."""
        return {key: value for key, value in self.__dict__.items() if key != "packed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.pack(self.long)


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on the device or the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU they take no time, and memory only for the pages that are written."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not size or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory is left for {size:,} bytes") from error
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
