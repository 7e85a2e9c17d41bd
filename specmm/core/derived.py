"""Values computed once from a network and reused until the network changes.

PyTorch counts only some changes of weights: ``load_state_dict``, ``copy_`` and optimizers increment
a tensor's version; writes to ``weight.data`` (PEFT merging a LoRA) and to tensors made in inference
mode do not. So :class:`Derived` compares address, version and also sums of the numbers, computed
once a call at half the speed of a memory copy.

A model's behaviour may also change without its weights: by a hook, another ``forward``, another
module, a number. Facts found by running a model are valid for one such form of it: :func:`fact`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

T = TypeVar("T")

WORD = 8  # bytes of the numbers that are summed
NUMBERS = (bool, int, float, str)
PARTS = vars(nn.Module()).keys()  # PyTorch's own attributes of a module


class _Call(local):
    """The call that this Python thread is in."""

    token: object | None = None


_call = _Call()


@contextmanager
def one_call(token: object = None) -> Iterator[None]:
    """Within the block networks are assumed not to change, so each is checked only once. A nested
    block belongs to the outer block; blocks with the same ``token`` are parts of one call.
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
    """A value computed from tensors, and recomputed when their numbers change.

    A tensor value is updated in place, because programs and CUDA graphs read that memory.
    """

    def __init__(self) -> None:
        self._found: T | None = None
        self._states: tuple[tuple[int, int], ...] | None = None
        self._layouts: list[tuple[Any, ...]] = []
        self._seen: list[_Seen] = []
        self._call: object | None = None

    def of(self, tensors: Sequence[Tensor], make: Callable[[], T]) -> T:
        """The result of ``make`` for these ``tensors``, reused until they change."""
        states = tuple(map(_state, tensors))
        if states == self._states and self._call is _call.token is not None:  # looked at already
            return self._found  # type: ignore[return-value]
        layouts = [(x.dtype, x.device, x.shape, x.stride()) for x in tensors]
        same = (states, layouts) == (self._states, self._layouts)
        if not same or not all(source.same() for source in self._seen):
            self._found = _in_place(self._found, make())
            self._states, self._layouts = states, layouts
            self._seen = [_Seen(x) for x in tensors if not x.is_meta]
        self._call = _call.token
        return self._found  # type: ignore[return-value]


def _in_place(before: T | None, after: T) -> T:
    """``after``, copied into the memory of the value ``before`` if the layouts match."""
    if type(before) is not Tensor or before.is_inference() or before.is_mkldnn:
        return after
    assert isinstance(after, Tensor)
    layouts = [(x.dtype, x.device, x.shape, x.stride()) for x in (before, after)]
    return before.copy_(after) if layouts[0] == layouts[1] else after  # type: ignore[return-value]


def _state(tensor: Tensor) -> tuple[int, int]:
    """The address of ``tensor`` and PyTorch's count of writes to it."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class _Seen:
    """A checksum of ``tensor``: the sum of each row, and the first row, which shows a changed
    order.

    While the tensor stays in place, it is read through views of its memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.rows, self.copied = _rows(tensor)
        self.sums, self.first = _summed(self.rows), self.rows[0].clone()

    def same(self) -> bool:
        """Whether the tensor still has this checksum."""
        rows = _rows(self.tensor)[0] if self.copied else self.rows
        return torch.equal(_summed(rows), self.sums) and torch.equal(rows[0], self.first)


def _summed(rows: Tensor) -> Tensor:
    return rows.sum(1, dtype=torch.int64)


@torch.no_grad()
def _rows(tensor: Tensor) -> tuple[Tensor, bool]:
    """The memory of ``tensor`` as rows of integers, and whether it had to be copied."""
    data = tensor.detach()
    if data.ndim == 2 and not data.is_contiguous() and data.t().is_contiguous():
        data = data.t()  # stored by column
    copied = not data.is_contiguous()
    data = data.contiguous()
    rows = data.flatten(1) if data.ndim > 1 else data.flatten()[None]
    in_words = rows.shape[1] * rows.element_size() % WORD == 0 and rows.data_ptr() % WORD == 0
    return rows.view(torch.int64 if in_words else torch.uint8), copied


def digest(network: nn.Module) -> str:
    """Sixteen hexadecimal digits of all weights and buffers of a ``network``: from the sums of the
    rows and columns of their bytes, which distinguish networks that
    :func:`specmm.loading.checkpoints.fingerprint` does not.
    """
    sha = hashlib.sha256()
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        sha.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        for array in _plain(tensor):
            if array.numel() and not array.is_meta:
                rows, _ = _rows(array)
                for sums in (_summed(rows), rows.sum(0, dtype=torch.int64)):
                    sha.update(sums.cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside a quantised ``tensor``, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


_forms: WeakKeyDictionary[nn.Module, tuple[object, list[Any], dict[Any, Any]]]
_forms = WeakKeyDictionary()  # the call it was looked at in, its form, the facts of that form


def fact(network: nn.Module, name: object, find: Callable[[], T]) -> T:
    """The result of ``find`` for the ``network`` in its present form, cached under ``name``."""
    cached = facts(network)
    if name not in cached:
        cached[name] = find()
    value: T = cached[name]
    return value


def facts(network: nn.Module) -> dict[Any, Any]:
    """All cached facts about the ``network`` in its present form, by name."""
    call, form, cached = _forms.get(network, (None, [], {}))
    if call is None or call is not _call.token:
        now = form_of(network)
        cached = cached if now == form else {}
        _forms[network] = _call.token, now, cached
    return cached


def version(*networks: nn.Module) -> tuple[Any, ...]:
    """A key that stays equal while compiled programs of ``networks`` remain valid: the networks'
    forms, the layout of their weights, and plain attributes of third-party modules, such as which
    adapter is active. Programs read the weights' values and addresses anew in each call.
    """
    layouts = tuple((x.dtype, x.device, x.shape, x.stride()) for x in _weights(networks))
    settings = tuple(
        repr([value for key, value in vars(module).items() if key not in PARTS and plain(value)])
        for network in networks
        for module in network.modules()
        if not type(module).__module__.startswith("specmm.")
    )
    return *(fact(network, "form", object) for network in networks), layouts, settings


def written(network: nn.Module) -> tuple[Any, ...]:
    """A key that changes when a weight is replaced or written to, but for writes that PyTorch does
    not count (see above): for those who cannot wait for sums of all numbers.
    """
    return tuple(map(_state, _weights([network])))


def placed(*networks: nn.Module) -> tuple[Any, ...]:
    """As :func:`version`, with the weights' addresses, which graphs cannot follow."""
    return *version(*networks), tuple(x.data_ptr() for x in _weights(networks))


def _weights(networks: Sequence[nn.Module]) -> Iterator[Tensor]:
    for network in networks:
        yield from network.parameters()
        yield from network.buffers()


def form_of(network: nn.Module) -> list[Any]:
    """Everything but the weights that changes a ``network``'s output and can be checked quickly:
    its modules and their classes, hooks that are not ours, replaced ``forward`` methods, and the
    plain numbers and texts among the attributes of the network and of its config.
    """
    first = next(network.parameters(), None)
    form: list[Any] = [] if first is None else [first.dtype, first.device]
    for config in _configs(network):
        form += [x for x in vars(config).items() if type(x[1]) in NUMBERS]
    for hooks in (_global_forward_hooks, _global_forward_pre_hooks):  # of all modules there are
        form += hooks.keys()
    classes, visited = set(), set()
    pending = [network]
    while pending:  # faster than network.modules()
        module = pending.pop()
        if module in visited:
            continue
        visited.add(module)
        classes.add(type(module))
        attributes = module.__dict__
        pending += filter(None, attributes["_modules"].values())
        form.append(ref(module))
        for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
            if hooks:  # by numbers that PyTorch gives to no other hook
                form += [key for key, hook in hooks.items() if not of_ours(hook)]
        if "forward" in attributes:
            form.append(_mark(attributes["forward"]))
    form += [(kind, _mark(kind.forward)) for kind in sorted(classes, key=id)]
    for key, value in vars(network).items():
        if key not in PARTS and (mark := _mark(value)) is not None:
            form += (key, mark)
    return form


def _configs(network: nn.Module) -> list[Any]:
    """A network's config, and the config of its text part."""
    config: Any = getattr(network, "config", None)
    if config is None:
        return []
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [config] if inner is config else [config, inner]


def of_ours(hook: Any) -> bool:
    """Whether a ``hook`` belongs to this package, which sets hooks only during calls."""
    hook = hook.func if isinstance(hook, partial) else hook
    return str(getattr(hook, "__module__", "")).startswith("specmm.")


def plain(value: Any) -> bool:
    """Whether ``value`` is a number, a text, or a container of only such values."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        return type(value) in NUMBERS
    return all(type(x) in NUMBERS for x in value)


def _mark(value: Any) -> Any:
    """A key that differs between different plain values or functions; None for other values."""
    if plain(value):
        return repr(value)
    kind = type(value)
    if kind is MethodType:  # a new object at each access
        return ref(value.__func__), ref(value.__self__)
    return ref(value) if kind is FunctionType else None
