"""Copies of what transformers calls while it answers. Logits processors and stopping criteria may
keep something from call to call: in attributes, closures and defaults, which are copied, or in
classes and globals, which are not.
"""

from __future__ import annotations

import copy
import dis
import gc
import sys
from collections.abc import Collection, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Variable: TypeAlias = tuple[Any, str]  # a cell, a class or globals, and a name there
SHARED = (nn.Module, PreTrainedTokenizerBase, ModuleType, type, CodeType)
LIBRARIES = sys.stdlib_module_names | {"numpy", "specmm", "tokenizers", "torch", "transformers"}
MOST = 10_000  # objects that are looked at


def copied(things: T) -> T:
    """Copies of processors or criteria, with the models and tokenizers that they use shared.

    Raises ``ValueError`` if their memory cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        _prepare(things, memo)
        return copy.deepcopy(things, memo)
    except Exception as error:  # of any class
        said = " ".join(str(error).split()) or type(error).__name__
        names = ", ".join(type(thing).__name__ for thing in things)  # type: ignore[attr-defined]
        raise ValueError(
            "what processors and criteria keep must be copied, for drafts that are rejected; of "
            f"{names} it cannot be ({said}): go by the ids alone, or give method='ar'"
        ) from error


def _reached(things: Any) -> list[Any]:
    """The objects that copies of ``things`` are made of, and the functions and shared objects among
    them; of many the first.
    """
    found: dict[int, Any] = {}
    left = list(things)
    while left and len(found) < MOST:
        thing = left.pop(0)
        if id(thing) in found:
            continue
        found[id(thing)] = thing
        if isinstance(thing, FunctionType):
            inner = (thing.__closure__, thing.__defaults__, thing.__kwdefaults__)
            left += () if _of_a_library(thing) else filter(None, inner)
        elif not isinstance(thing, SHARED):
            left += filter(gc.is_tracked, gc.get_referents(thing))
    return list(found.values())


def _of_a_library(thing: Any) -> bool:
    return str(thing.__module__).split(".")[0] in LIBRARIES


def _prepare(things: Any, memo: dict[int, Any]) -> None:
    """Put into the ``memo`` of :func:`copy.deepcopy` what copies of ``things`` share, and copies of
    functions, which it would share: with variables and defaults of their own.
    """
    reached = _reached(things)
    memo |= {id(thing): thing for thing in reached if isinstance(thing, SHARED)}
    cells = {id(x): (x, CellType()) for x in reached if isinstance(x, CellType)}
    functions = [x for x in reached if isinstance(x, FunctionType) and not _of_a_library(x)]
    for function in functions:
        own = tuple(cells[id(cell)][1] for cell in function.__closure__ or ())
        given = (function.__code__, function.__globals__, function.__name__)
        memo[id(function)] = FunctionType(*given, closure=own)
    for cell, copied_cell in cells.values():
        for content in gc.get_referents(cell):  # none of an empty one
            copied_cell.cell_contents = copy.deepcopy(content, memo)
    for function in functions:
        memo[id(function)].__defaults__ = copy.deepcopy(function.__defaults__, memo)
        memo[id(function)].__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)


class Outside:
    """The variables that ``things`` reach and that copies of them share: of classes, of globals
    that functions name, and of closures of functions that are found there.
    """

    def __init__(self, things: Any) -> None:
        reached = _reached(things)
        own = {id(thing) for thing in reached}  # functions among them are copied
        left = _code_of(reached)
        self.variables: list[Variable] = []
        seen: set[int] = set()
        while left and len(seen) < MOST:
            thing = left.pop()
            if id(thing) in seen or _of_a_library(thing):
                continue
            seen.add(id(thing))
            for place, name in _variables(thing, id(thing) in own):
                inner = _reached([_value((place, name))])
                left += _code_of(inner)
                data = not isinstance(inner[0], (FunctionType, *SHARED))
                if data and not (isinstance(place, type) and name.startswith("__")):
                    self.variables.append((place, name))

    def now(self) -> object:
        """What differs between different contents of the variables."""
        return [_printed(_value(variable)) for variable in self.variables]


def _variables(thing: Any, copied: bool) -> list[Variable]:
    """Those of a class, or of a function that is ``copied`` with its closure or shared with it."""
    if isinstance(thing, type):
        return [(thing, name) for name in vars(thing)]
    cells = () if copied else thing.__closure__ or ()
    names = _names(thing.__code__) & thing.__globals__.keys()
    return [*((thing.__globals__, name) for name in names), *((x, "cell_contents") for x in cells)]


def _code_of(things: list[Any]) -> list[Any]:
    """The functions among ``things``, and the classes there and of them."""
    plain = [getattr(x, "fget", x) if isinstance(x, property) else x for x in things]
    kinds = {x if isinstance(x, type) else type(x) for x in plain}
    functions = [x for x in plain if isinstance(x, FunctionType)]
    return [*functions, *dict.fromkeys(base for kind in kinds for base in kind.__mro__)]


def _names(code: CodeType) -> set[str]:
    """The globals that ``code`` and what is defined in it read or set."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    own = {x.argval for x in dis.get_instructions(code) if x.opname.endswith("_GLOBAL")}
    return own.union(*map(_names, inner))


def _value(variable: Variable) -> Any:
    place, name = variable
    return place.get(name) if isinstance(place, dict) else getattr(place, name, None)


def _printed(value: Any, levels: int = 6) -> object:
    """What differs between different contents of ``value``, to so many ``levels``."""
    if isinstance(value, Tensor):
        return value.data_ptr(), 0 if value.is_inference() else value._version
    if not levels or isinstance(value, (FunctionType, *SHARED)):
        return id(value)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray):
        return [_printed(x, levels - 1) for x in value] if len(value) < MOST else len(value)
    own = "" if hasattr(value, "__dict__") else repr(value)
    return own, [_printed(x, levels - 1) for x in gc.get_referents(value)]
