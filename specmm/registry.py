"""Names to things, looked up lazily, and choices as text such as ``typical(epsilon=0.2)``."""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any


class OldName(FutureWarning):
    """Warns of a name that still works, for one release."""


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a ``name`` that is no ``kind``: suggests the nearest, else lists all."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    if near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"choose from: {', '.join(names) or '(there are none)'}"
    return ValueError(f"unknown {kind} {name!r}; {hint}")


def named(place: str) -> Any:
    """What ``place``, ``"module:attribute"``, names, imported now."""
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


class Registry:
    """Names of one kind of thing, each ``"module:attribute"``, imported on first use."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self.entries = entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def get(self, name: str) -> Any:
        """The thing called ``name``; raises ``ValueError`` with a suggestion."""
        if name not in self.entries:
            raise unknown(self.kind, name, self.entries)
        return named(self.entries[name])


def parse_spec(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the values and the named values of ``text``: numbers or words.

    Raises ``ValueError`` for anything else.
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name.strip(), [], {}
    if not rest.endswith(")"):
        raise ValueError(f"a choice must read NAME or NAME(KEY=VALUE, …), got {text!r}")
    values: list[Any] = []
    options: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in rest[:-1].split(","))):
        key, equals, value = part.rpartition("=")
        if equals:
            options[key.strip().replace("-", "_")] = _value(value.strip())
        else:
            values.append(_value(part))
    return name.strip(), values, options


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
