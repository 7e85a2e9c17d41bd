"""Names to things, looked up lazily, with a suggestion when a name is not known."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a ``name`` that is no ``kind``: it suggests the nearest, else lists what there
    is.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"choose from: {', '.join(names) or '(there are none)'}"
    )
    return ValueError(f"unknown {kind} {name!r}; {hint}")


def named(place: str) -> Any:
    """What ``place`` names, ``"module:attribute"``, imported now."""
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


class Registry:
    """Names of one kind of thing, each ``"module:attribute"``, imported on first use."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind, self.entries = kind, entries

    def __iter__(self) -> Any:
        return iter(self.entries)

    def get(self, name: str) -> Any:
        """The thing called ``name``; raises ``ValueError`` with a suggestion."""
        if name not in self.entries:
            raise unknown(self.kind, name, self.entries)
        return named(self.entries[name])
