"""What is computed once from a network and kept, as long as the network is what it was.

Weights change in many ways, of which PyTorch counts some: ``load_state_dict``, ``copy_`` and
optimizers move a tensor's version; writes to ``weight.data``, as PEFT merges a LoRA, and to tensors
made in inference mode do not. So beside place and version the numbers themselves are summed, once a
call, which reads memory at half the speed of a copy: :class:`Derived`.

What a model does beside its weights may change, too: a hook, another ``forward``, another module, a
number. Facts that were found out by running it are those of one form of it: :func:`fact`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from threading import local
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

T = TypeVar("T")

SMALL = 2**15  # bytes up to which a tensor is remembered as it is
ROWS = 4  # of a larger one, remembered as they are: sums do not tell the order in a row
WORD = 8  # bytes of the numbers that are summed
NUMBERS = (bool, int, float, str)
PARTS = vars(nn.Module()).keys()  # what PyTorch keeps of a network, at first
FIRST = next(iter(PARTS))


class _Call(local):
    """The call that this Python thread is in."""

    token: object | None = None


_call = _Call()


@contextmanager
def one_call(token: object = None) -> Iterator[None]:
    """Within the block networks stay what they are: each is looked at once. A block within another
    is part of it. Blocks with the same ``token`` are parts of one call.
    """
    if _call.token is not None:
        yield
        return
    _call.token = object() if token is None else token
    try:
        yield
    finally:
        _call.token = None


def in_a_call() -> bool:
    """Whether this Python thread is within :func:`one_call`."""
    return _call.token is not None


class Derived(Generic[T]):
    """What is computed from tensors, computed again once they hold other numbers."""

    def __init__(self) -> None:
        self._found: T | None = None
        self._places: list[tuple[Any, ...]] | None = None
        self._numbers: list[Tensor] = []
        self._call: object | None = None

    def of(self, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        """What ``make`` gives for these ``tensors``: now, or when they were the same."""
        places = [_place(tensor) for tensor in tensors]
        if places == self._places and self._call is _call.token is not None:
            return self._found  # type: ignore[return-value]
        numbers = [part for tensor in tensors for part in _numbers(tensor)]
        if places != self._places or not _equal(numbers, self._numbers):
            self._found = make()
        self._places, self._numbers, self._call = places, numbers, _call.token
        return self._found  # type: ignore[return-value]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What PyTorch tells of ``tensor``: no reading."""
    version = 0 if tensor.is_inference() else tensor._version
    place = 0 if tensor.is_meta else tensor.data_ptr()
    return place, version, tensor.dtype, tensor.device, tensor.shape, tensor.stride()


@torch.no_grad()
def _numbers(tensor: Tensor) -> list[Tensor]:
    """Integers that are others when ``tensor`` holds other numbers: its own bytes where it is
    small, else the sum of each row, and a few rows.
    """
    if tensor.is_meta:  # accelerate brings it when its layer runs
        return []
    tensor = tensor.detach()
    if tensor.ndim == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous():
        tensor = tensor.t()  # stored by column
    tensor = tensor.contiguous()
    if tensor.nbytes <= SMALL:
        return [tensor.flatten().view(torch.uint8).clone()]
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[None]
    own = rows[:: max(1, len(rows) // ROWS)].reshape(-1).view(torch.uint8)
    if rows.shape[1] * rows.element_size() % WORD or rows.data_ptr() % WORD:
        return [rows.view(torch.uint8).sum(1, dtype=torch.int64), own.clone()]
    return [rows.view(torch.int64).sum(1), own.clone()]


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


_forms: WeakKeyDictionary[nn.Module, tuple[object, list[Any], dict[Any, Any]]]
_forms = WeakKeyDictionary()  # the call it was looked at in, its form, the facts of that form


def fact(network: nn.Module, name: object, find: Callable[[], T]) -> T:
    """What ``find`` finds out about the ``network`` as it is now, kept under ``name``."""
    known = facts(network)
    if name not in known:
        known[name] = find()
    found: T = known[name]
    return found


def facts(network: nn.Module) -> dict[Any, Any]:
    """All that is known of the ``network`` as it is now, by name."""
    call, form, known = _forms.get(network, (None, [], {}))
    if call is None or call is not _call.token:
        now = form_of(network)
        known = known if now == form else {}
        _forms[network] = _call.token, now, known
    return known


def form_of(network: nn.Module) -> list[Any]:
    """What a ``network`` computes by beside its weights, as far as it is seen at a glance: its
    modules and their classes, hooks that are not ours, methods in place of a class's own, plain
    numbers and texts of the config and of modules that are not ours.
    """
    first = next(network.parameters(), None)
    found: list[Any] = [] if first is None else [first.dtype, first.device]
    for config in _configs(network):
        found += [x for x in vars(config).items() if type(x[1]) in NUMBERS]
    classes, seen = set(), set()
    left = [network]
    while left:  # faster than network.modules()
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        classes.add(type(module))
        own = module.__dict__
        left += filter(None, own["_modules"].values())
        found.append(ref(module))
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            if hooks:  # by numbers that PyTorch gives to no other hook
                found += [key for key, hook in hooks.items() if not of_ours(hook)]
        if not module.__module__.startswith("specmm."):  # ours count what they do
            found += _marks(own)
    found += [(kind, _mark(kind.forward)) for kind in sorted(classes, key=id)]
    return found


def _marks(own: dict[str, Any]) -> list[Any]:
    """Of a module's ``own`` attributes those that are not PyTorch's."""
    first = len(PARTS) if next(iter(own)) == FIRST else 0
    found: list[Any] = []
    for key, value in islice(own.items(), first, None):
        if key not in PARTS and (mark := _mark(value)) is not None:
            found += (key, mark)
    return found


def _configs(network: nn.Module) -> list[Any]:
    config: Any = getattr(network, "config", None)
    if config is None:
        return []
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [config] if inner is config else [config, inner]


def of_ours(hook: Any) -> bool:
    """Whether a ``hook`` is one of this package's, which come and go with a call."""
    hook = hook.func if isinstance(hook, partial) else hook
    return str(getattr(hook, "__module__", "")).startswith("specmm.")


def _mark(value: Any) -> Any:
    """What tells a number, a text, a few of them or a function from another; None for the rest."""
    kind = type(value)
    if kind in NUMBERS:
        return value
    if kind is MethodType:  # a new object at each access
        return ref(value.__func__), ref(value.__self__)
    if kind is FunctionType:
        return ref(value)
    if kind in (list, tuple, set, dict):
        items = value.values() if kind is dict else value
        return repr(value) if all(type(x) in NUMBERS for x in items) else None
    return None
