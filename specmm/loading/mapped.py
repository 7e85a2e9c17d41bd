"""Loads models without more memory than their weights take.

A checkpoint is mapped, not read: its tensors cost nothing until they are touched. A module is made
without weights, then filled tensor by tensor in the wanted dtype; a copied tensor's pages go back
to the system. PyTorch aligns the copies, so that products do not depend on a tensor's place in its
file, and the file may be overwritten.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# A dtype, or which one suits a model of so many parameters
DtypeChoice = torch.dtype | Callable[[int], torch.dtype]
MAPPED = "_specmm_mapped"  # on tensors whose memory is a file's: the version that is its own
MAPS = Path("/proc/self/maps")
UNUSED = 4  # MADV_DONTNEED: private pages that were only read are the file's again
META = torch.device("meta")
DRAWN = ("normal_", "uniform_")  # random initialisers of ``torch.nn.init`` and of tensors


class WithoutWeights(TorchFunctionMode):
    """Context in which modules are made with their weights on the meta device.

    Only tensors made by ``torch.empty``, as layers make their weights, lack values; computed
    tables, such as rotary angles, have them. Random initialisation is skipped, because importing
    PyTorch's code to trace it takes a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is torch.empty and arguments.get("device") is None:
            arguments["device"] = META
        weight = args[0] if args else arguments.get("tensor")
        drawn = getattr(func, "__name__", "") in DRAWN
        if drawn and isinstance(weight, Tensor) and weight.device == META:
            return weight
        return func(*args, **arguments)


def unfilled(module: nn.Module) -> bool:
    """Whether ``module`` was made without weights."""
    return any(weight.device == META for weight in module.parameters())


def size_of(module: nn.Module) -> int:
    """The parameters of ``module``, with or without values."""
    return sum(weight.numel() for weight in module.parameters())


def chosen_dtype(dtype: DtypeChoice | None, module: nn.Module) -> torch.dtype | None:
    """``dtype``, or the result of calling it with the size of ``module``."""
    return dtype(size_of(module)) if callable(dtype) else dtype


def mark(tensors: Iterable[Tensor], file: Path) -> None:
    """Note which of ``tensors`` are mapped from ``file``, according to the system (Linux only)."""
    ranges = _mappings(file)
    for tensor in tensors:
        first = tensor.untyped_storage().data_ptr()
        last = first + tensor.untyped_storage().nbytes()
        mapped = any(start <= first and last <= end for start, end in ranges)
        if mapped and not tensor.is_inference():  # inference tensors do not count changes
            setattr(tensor, MAPPED, tensor._version)


@contextmanager
def marked(tensors: Iterable[Tensor], files: Iterable[Path]) -> Iterator[None]:
    """Within the block, mark the ``tensors`` that are mapped from one of ``files``; later they may
    get their own memory.
    """
    listed = list(tensors)
    for file in files:
        mark(listed, file)
    try:
        yield
    finally:
        for tensor in listed:
            vars(tensor).pop(MAPPED, None)


def _mappings(file: Path) -> list[tuple[int, int]]:
    """The address ranges in this process to which ``file`` is mapped."""
    if sys.platform != "linux" or not MAPS.is_file():
        return []
    name = str(file.resolve())
    mappings = []
    for line in MAPS.read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] == name:
            start, _, end = parts[0].partition("-")
            mappings.append((int(start, 16), int(end, 16)))
    return mappings


def give_back(tensor: Tensor) -> None:
    """Let the system take back the pages of ``tensor`` if they are a file's; its values stay.

    A tensor that was changed in place stays in memory, because the file has other values; so do
    pages that it shares with other tensors.
    """
    version = getattr(tensor, MAPPED, None)
    if version is None or version != tensor._version or not tensor.is_contiguous():
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), UNUSED)


def moved(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """``tensor`` on ``device`` and, if floating-point, in ``dtype``; gives its old pages back."""
    placed = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
    if placed is not tensor:
        give_back(tensor)
    return placed


def owned(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``, copied to its own memory."""
    return tensor.detach().to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def fill(module: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Give an unfilled ``module`` copies of ``state``, its parameters in ``dtype``.

    Without ``dtype`` they get the module's dtypes, as buffers always do. Names and shapes must have
    been checked; a tensor under two names is copied once.
    """
    floating = {name for name, x in module.named_parameters(remove_duplicate=False)}
    copies: dict[tuple[int, torch.dtype], Tensor] = {}
    filled = {}
    for name, current in module.state_dict().items():
        tensor = state[name]
        target_dtype = dtype if dtype is not None and name in floating else current.dtype
        key = (id(tensor), target_dtype)
        if key not in copies:
            copies[key] = owned(tensor, target_dtype)
            give_back(tensor)
        filled[name] = copies[key]
    module.load_state_dict(filled, assign=True)
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()
    rest = [name for name, x in [*module.named_parameters(), *module.named_buffers()] if x.is_meta]
    assert not rest, f"left without values: {rest}"
