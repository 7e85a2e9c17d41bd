"""What a compiled program was made of, as text that two processes agree on.

A program may be run again on values of the same classes with the same attributes, on networks of
the same sizes, and with the same code. Numbers and tensors that belong to neither networks nor
settings are apart, since PyTorch's guards check them in each call.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, range, slice, Enum)
PLAIN += (torch.dtype, torch.device, torch.Size)
OWN_HASH = "_original_object_hash"  # of transformers' settings: another in each process
CODE = (types.FunctionType, staticmethod, classmethod, property)


class Fingerprint:
    """Of a call's ``args`` under ``settings``: ``parts`` is about what no guard checks, ``numbers``
    about all else.

    Numbers of settings count among the parts; frozen dataclasses, closures and defaults are
    settings as well. Objects whose class says ``unread`` are left out: programs read nothing of
    them.
    """

    def __init__(self, settings: Sequence[object], args: tuple[object, ...]) -> None:
        self._parts, self._numbers = hashlib.sha256(), hashlib.sha256()
        self._seen: dict[tuple[int, bool], tuple[int, object]] = {}
        self._walk(settings, True)
        self._walk(args, False)

    @property
    def parts(self) -> str:
        """Hexadecimal digits."""
        return self._parts.hexdigest()[:24]

    @property
    def numbers(self) -> str:
        """Hexadecimal digits."""
        return self._numbers.hexdigest()[:12]

    def _say(self, *facts: object, settled: bool = True) -> None:
        (self._parts if settled else self._numbers).update(repr(facts).encode())

    def _walk(self, value: Any, settled: bool) -> None:
        self._say(_name(type(value)))
        if _unread(value):
            return
        if isinstance(value, PLAIN):
            self._say(value, settled=settled or isinstance(value, Enum))
            return
        if (id(value), settled) in self._seen:
            self._say("as", self._seen[id(value), settled][0])
            return
        self._seen[id(value), settled] = (len(self._seen), value)  # held, so that no id comes again
        if isinstance(value, Tensor):
            self._say(*_layout(value), settled=settled)
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            self._say(_name(value))
        elif isinstance(value, Mapping):
            self._entries(value, settled)
        elif isinstance(value, set | frozenset):
            self._say(sorted(map(repr, value)), settled=settled)
        else:
            self._members(value, settled)

    def _members(self, value: Any, settled: bool) -> None:
        """Of sequences, functions and any other object."""
        if isinstance(value, types.FunctionType):
            self._say(_name(value), _code(value.__code__))
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            self._walk((value.__defaults__, value.__kwdefaults__, cells), True)
        elif isinstance(value, types.MethodType):
            self._walk((value.__func__, value.__self__), settled)
        elif isinstance(value, functools.partial):
            self._walk((value.func, value.args, value.keywords), True)
        else:
            if isinstance(value, list | tuple):
                self._say(len(value))
                for item in value:
                    self._walk(item, settled)
            self._entries(_attributes(value), settled or _settings(value))

    def _entries(self, entries: Mapping[Any, Any], settled: bool) -> None:
        for key, value in entries.items():
            if not _unread(value):
                self._walk(key, True)
                self._walk(value, settled)
        self._say("end")


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """Digests of the functions, methods and constants of ``modules`` by name, as they are now.

    Raises ``ImportError`` for one that there is not.
    """
    found = {}
    for name in sorted(modules):
        module = sys.modules.get(name) or __import__(name, fromlist=["*"])
        facts = repr(_namespace(vars(module), name))
        found[name] = hashlib.sha256(facts.encode()).hexdigest()
    return found


def _namespace(names: Mapping[str, Any], module: str) -> list[object]:
    return [
        (name, _definition(value, module))
        for name, value in sorted(names.items())
        if not name.startswith("__") or isinstance(value, CODE)  # Python's own change as it goes on
    ]


def _definition(value: Any, module: str) -> object:
    """What ``module``, or a class in it, says that a name is."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        return [_definition(part, module) for part in (value.fget, value.fset)]
    if isinstance(value, functools.cached_property):
        value = value.func
    if isinstance(value, type) and value.__module__ == module:
        bases = [_name(base) for base in value.__mro__]
        return _name(value), bases, _namespace(vars(value), module)
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return _name(value)
    if callable(value) and hasattr(value, "__wrapped__"):
        return _function(value), _function(value.__wrapped__)
    return _function(value)


def _function(value: Any) -> object:
    if not isinstance(value, types.FunctionType):
        return _plain(value)
    return _name(value), _code(value.__code__), _plain(value.__defaults__)


def _plain(value: object) -> object:
    """Constants as they are, the kind of all else."""
    if isinstance(value, tuple | frozenset):
        items = [_plain(item) for item in value]
        return items if isinstance(value, tuple) else sorted(map(repr, items))
    return repr(value) if isinstance(value, (*PLAIN, type(None))) else _name(type(value))


def _code(code: types.CodeType) -> object:
    consts = [_code(x) if isinstance(x, types.CodeType) else _plain(x) for x in code.co_consts]
    return code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars


def _unread(value: object) -> bool:
    return getattr(type(value), "unread", False) is True


def _name(value: Any) -> str:
    parts = (getattr(value, name, "") for name in ("__module__", "__qualname__", "__name__"))
    return ".".join(str(part) for part in parts)


def _layout(x: Tensor) -> tuple[object, ...]:
    strides = x.stride() if x.layout is torch.strided else None
    return x.shape, strides, x.dtype, x.device, x.layout, x.requires_grad, x.is_inference()


def _settings(value: object) -> bool:
    """Whether the numbers of ``value`` stay: no guard asks a network for its own."""
    facts = getattr(type(value), "__dataclass_params__", None)
    return isinstance(value, nn.Module) or getattr(facts, "frozen", False)


def _attributes(value: object) -> dict[str, Any]:
    """But for what a ``cached_property`` keeps, which follows from the rest."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    cached = functools.cached_property
    return {
        name: found[name]
        for name in sorted(found)
        if name != OWN_HASH and not isinstance(getattr(type(value), name, None), cached)
    }
