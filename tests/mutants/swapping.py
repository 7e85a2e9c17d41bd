"""Puts a mutation into effect without changing a file.

A process that has imported everything exchanges the code of live functions (:class:`Functions`).
One that has not is given the mutated source when it imports the module (:func:`import_instead`).
"""

from __future__ import annotations

import gc
import importlib.machinery
import inspect
import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

Key = tuple[str, int]  # qualified name and first line
ALIKE = (
    *("co_code", "co_exceptiontable", "co_flags", "co_names"),
    *("co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)


class Functions:
    """All functions there are, by file, qualified name and line."""

    def __init__(self) -> None:
        gc.unfreeze()  # what conftest.py froze is not listed otherwise
        self.found: dict[str, dict[Key, list[FunctionType]]] = {}
        for function in [x for x in gc.get_objects() if type(x) is FunctionType]:
            code = function.__code__
            file = self.found.setdefault(os.path.realpath(code.co_filename), {})
            file.setdefault(_key(code), []).append(function)
        gc.freeze()

    def changes(self, file: Path, text: str) -> list[tuple[FunctionType, CodeType]]:
        """The functions of ``file`` that ``text`` in its place changes, with their new code.

        Empty where something else changes, too (what a module or a class does when it is made), or
        where a changed function cannot be told from others or is not there yet.
        """
        live = self.found.get(os.path.realpath(file), {})
        old, new = (
            compile(x, str(file), "exec", dont_inherit=True) for x in (file.read_text(), text)
        )
        pairs = list(_differing(old, new))
        keys = [_key(before) for before, _ in pairs]
        makers = any(not before.co_flags & inspect.CO_OPTIMIZED for before, _ in pairs)
        if makers or len(set(keys)) < len(keys) or not any(key in live for key in keys):
            return []
        cells = all(a.co_freevars == b.co_freevars for a, b in pairs)
        found = [
            (f, new) for (_, new), key in zip(pairs, keys, strict=True) for f in live.get(key, ())
        ]
        return found if cells else []


def exchange(changes: list[tuple[FunctionType, CodeType]]) -> None:
    """Give each function its new code."""
    for function, code in changes:
        function.__code__ = code


def import_instead(file: Path, text: str) -> None:
    """From now on, importing ``file`` runs ``text``; whoever reads the source reads it, too."""
    plain = importlib.machinery.SourceFileLoader.get_code
    target = os.path.realpath(file)

    def get_code(self: Any, name: str) -> CodeType | None:
        path = self.get_filename(name)
        if os.path.realpath(path) != target:
            return plain(self, name)
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        return compile(text, path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _key(code: CodeType) -> Key:
    return code.co_qualname, code.co_firstlineno


def _differing(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The pairs of code, outer before inner, of which the one does otherwise than the other."""
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    if not _same(old, new):
        yield old, new
    if len(inner[0]) == len(inner[1]):
        for before, after in zip(*inner, strict=True):
            yield from _differing(before, after)


def _same(old: CodeType, new: CodeType) -> bool:
    """Whether they do the same, wherever their lines are, but for functions made within: a class
    or a module only makes those, which may be exchanged once they are made.
    """
    if any(getattr(old, name) != getattr(new, name) for name in ALIKE):
        return False
    if len(old.co_consts) != len(new.co_consts):
        return False
    makes = not old.co_flags & inspect.CO_OPTIMIZED
    return all(
        _same_constant(a, b, makes) for a, b in zip(old.co_consts, new.co_consts, strict=True)
    )


def _same_constant(old: Any, new: Any, makes: bool) -> bool:
    if isinstance(old, CodeType) and isinstance(new, CodeType):
        return makes or _same(old, new)
    return type(old) is type(new) and repr(old) == repr(new)
