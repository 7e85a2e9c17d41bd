"""The peak memory of a run, measured: what the planner's forecasts are checked against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def measured_peak(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors that ``run()`` holds at a time on ``device``, beside those that were
    there before.

    On a CPU, buffers inside a kernel are not seen.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return int(torch.cuda.max_memory_allocated(device) - before)
    with _Watch() as watch:
        run()
    return watch.peak


class _Watch(TorchDispatchMode):
    """Keeps account of the storages that operations make, from the first output to the last
    reference.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(x) for x in tree_leaves((args, kwargs)) if _stored(x)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if _stored(x) and _key(x) not in given:
                storage = x.untyped_storage()
                self._alive[_key(x)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {
            k: (ref, size) for k, (ref, size) in self._alive.items() if not ref.expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def _stored(x: object) -> TypeGuard[Tensor]:
    """Whether ``x`` is a tensor with a storage: weights in oneDNN's blocks
    (``specmm.loading.hardware``) have none to be seen.
    """
    return isinstance(x, Tensor) and x.layout == torch.strided


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
