"""Copies logits processors and stopping criteria. They may remember earlier calls: in attributes,
closures and defaults, which are copied, or in classes and globals, which are not.
"""

from __future__ import annotations

import copy
import dis
import functools
import gc
import logging
import sys
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
PLAIN = (int, float, complex, str, bytes, type(None))
KEPT = (nn.Module, PreTrainedTokenizerBase, ModuleType, CodeType, logging.Logger)  # never copied
CACHE = type(functools.cache(len))
LIBRARIES = sys.stdlib_module_names | {"numpy", "specmm", "tokenizers", "torch", "transformers"}
NOTED = ("__dict__", "__slotnames__", "__weakref__")  # by Python, of a class
MOST = 10_000  # objects that are looked at


def copied(objects: T) -> T:
    """Copies of processors or criteria, with the models and tokenizers that they use shared.

    Raises ``ValueError`` if their memory cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        _prepare(objects, memo)
        return copy.deepcopy(objects, memo)
    except Exception as error:  # of any class of errors
        reason = " ".join(str(error).split()) or type(error).__name__
        names = ", ".join(type(obj).__name__ for obj in objects)  # type: ignore[attr-defined]
        raise ValueError(
            "the memory of processors and criteria must be copyable, because drafts may be "
            f"rejected; {names} cannot be copied ({reason}): depend on the ids alone, or give "
            "method='ar'"
        ) from error


def _prepare(objects: Any, memo: dict[int, Any]) -> None:
    """Fill the ``memo`` of :func:`copy.deepcopy` with objects that copies of ``objects`` share, and
    with copies of functions (which it would share) that have their own variables and defaults.
    """
    reached = [obj for obj, _ in _reached(objects, shared=False)]
    memo |= {id(obj): obj for obj in reached if isinstance(obj, KEPT)}
    cells = {id(x): (x, CellType()) for x in reached if isinstance(x, CellType)}
    functions = [x for x in reached if isinstance(x, FunctionType) and not _of_a_library(x)]
    for function in functions:
        cells_copied = tuple(cells[id(cell)][1] for cell in function.__closure__ or ())
        parts = (function.__code__, function.__globals__, function.__name__)
        memo[id(function)] = FunctionType(*parts, closure=cells_copied)
    for cell, copied_cell in cells.values():
        for content in gc.get_referents(cell):  # none of an empty one
            copied_cell.cell_contents = copy.deepcopy(content, memo)
    for function in functions:
        memo[id(function)].__defaults__ = copy.deepcopy(function.__defaults__, memo)
        memo[id(function)].__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)


def state_of(objects: Any) -> object:
    """A value that stays equal while ``objects`` and the variables that their code reaches (of
    classes, closures and named globals) stay the same.
    """
    state: list[object] = []
    for obj, inner in _reached(objects, shared=True):
        if isinstance(obj, Tensor):
            state.append((obj.data_ptr(), 0 if obj.is_inference() else obj._version))
        else:
            values = [x if type(x) in PLAIN else id(x) for x in inner]
            state.append(("" if inner else repr(obj), values))
    return state


def _reached(objects: Any, shared: bool) -> list[tuple[Any, list[Any]]]:
    """The objects reachable from ``objects``, each with the objects that it holds, up to a limit.
    Classes and globals, which copies share, are followed if ``shared``.
    """
    reached: dict[int, tuple[Any, list[Any]]] = {}
    pending = list(objects)
    for obj in pending:
        if id(obj) not in reached and type(obj) not in PLAIN:
            reached[id(obj)] = obj, _references(obj, shared)
            pending += reached[id(obj)][1]
        if len(reached) == MOST:
            break
    return list(reached.values())


def _references(obj: Any, shared: bool) -> list[Any]:
    """The objects that ``obj`` refers to and a copy would need; see :func:`_reached`."""
    if isinstance(obj, (*KEPT, CACHE, Tensor)) or _of_a_library(obj):
        return []
    if isinstance(obj, type):
        attributes = {name: x for name, x in vars(obj).items() if name not in NOTED}
        return [*attributes.values(), *obj.__bases__] if shared else []
    if not isinstance(obj, FunctionType):
        getattr(obj, "__dict__", None)  # made now, and not by the first who asks
        return gc.get_referents(obj)
    names = obj.__globals__
    named = [names[name] for name in _global_names(obj.__code__) if name in names] if shared else []
    return [*(obj.__closure__ or ()), obj.__defaults__, obj.__kwdefaults__, *named]


def _of_a_library(obj: Any) -> bool:
    code = isinstance(obj, FunctionType | type)
    return code and str(obj.__module__).split(".")[0] in LIBRARIES


@functools.lru_cache(1000)
def _global_names(code: CodeType) -> set[str]:
    """The globals that ``code`` and functions defined in it read or set."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    global_names = {x.argval for x in dis.get_instructions(code) if x.opname.endswith("_GLOBAL")}
    return global_names.union(*map(_global_names, inner))
