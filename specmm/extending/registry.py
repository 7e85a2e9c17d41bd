"""Registries from names to objects, imported lazily, and choices written as text, such as
``typical(epsilon=0.2)``.

Third-party drafters, rules and trees get names by :func:`specmm.register`, or by an installed
package's entry points ``specmm.drafters``, ``specmm.rules`` and ``specmm.trees``, which are
imported at first use.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

T = TypeVar("T")
MOST_NAME = 200  # characters of an unknown name that an error shows
OPTION = 0.75  # how alike an option must be to one that there is, to be taken for it
# by kind, what was registered by name
REGISTERED: dict[str, dict[str, Any]] = {"drafter": {}, "rule": {}, "tree": {}}


def nearest(name: str, known: Sequence[str], alike: float = 0.5) -> list[str]:
    """The ``known`` names that ``name`` may mean: names that begin with it, or else the nearest
    name with a difflib ratio of at least ``alike`` (0 to 1).
    """
    beginnings = [one for one in known if one.startswith(name)] if len(name.strip("-_")) > 2 else []
    return beginnings[:2] or difflib.get_close_matches(name, known, n=1, cutoff=alike)


def unknown(kind: str, name: object, known: Iterable[str], alike: float = 0.5) -> ValueError:
    """The error for a ``name`` that is not a ``kind``: suggests the nearest name, or lists all.

    A folder that all names share is ignored, and a ``name`` longer than all known names gets no
    suggestion. See :func:`nearest` for ``alike``.
    """
    if len(str(name)) > MOST_NAME:
        name = f"{str(name)[:MOST_NAME]}…"
    names = sorted(known)
    folders = {option.rpartition("/")[0] for option in names}
    folder = f"{folders.pop()}/" if len(folders) == 1 and "" not in folders else ""
    bare = [option.removeprefix(folder) for option in names]
    near = nearest(str(name).removeprefix(folder), bare, alike)
    if near:
        hint = f"did you mean {' or '.join(repr(folder + option) for option in near)}?"
    else:
        hint = f"choose from: {', '.join(names) or '(there are none)'}"
    return ValueError(f"unknown {kind} {name!r}; {hint}")


def named(place: str) -> Any:
    """The object at ``place``, ``"module:attribute"``, imported now."""
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


class Registry:
    """Objects of one ``kind`` by name, each as ``"module:attribute"``, imported at first use."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self.entries = entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def get(self, name: str) -> Any:
        """The object called ``name``; raises ``ValueError`` with a suggestion."""
        if name not in self.entries:
            raise unknown(self.kind, name, self.entries)
        return named(self.entries[name])


class Open(Mapping[str, T]):
    """Our ``shipped`` entries of a ``kind`` by name, then third-party entries, which ``entry``
    makes from a name and the registered object.

    A third-party entry never replaces ours.
    """

    def __init__(self, kind: str, shipped: Mapping[str, T], entry: Callable[[str, Any], T]) -> None:
        self.kind = kind
        self.own = shipped
        self.entry = entry

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        return self.entry(name, registered(self.kind, name))

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in names_of_others(self.kind) if name not in self.own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def names_of_others(kind: str) -> list[str]:
    """Third-party names of a ``kind``: registered, or from installed packages."""
    return list({**REGISTERED[kind], **_entry_points(kind)})


def registered(kind: str, name: str) -> Any:
    """The third-party object of a ``kind`` called ``name``, registered or from a package.

    Raises ``KeyError`` if there is none, and ``ValueError`` if it cannot be imported.
    """
    if name in REGISTERED[kind]:
        return REGISTERED[kind][name]
    point = _entry_points(kind)[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        package = "a package" if point.dist is None else point.dist.name
        raise ValueError(
            f"{kind} {name!r} of {package} must be importable as {point.value}, got {error}; "
            "install that package again"
        ) from error


def _entry_points(kind: str) -> dict[str, EntryPoint]:
    """Entry points of installed packages, cached until one is installed: reading takes 10 ms."""
    return _read_entry_points(kind, tuple((folder, _changed(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=16)
def _read_entry_points(kind: str, _: Hashable) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"specmm.{kind}s")}


def _changed(folder: str) -> int:
    """The time of the last change to the entries of ``folder``; 0 if it does not exist."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def whole(thing: Any) -> Any:
    """``thing``, or the function inside a ``functools.partial``."""
    return thing.func if isinstance(thing, functools.partial) else thing


def maker_of(thing: object) -> str:
    """The top module of ``thing`` (a class, function or object), its maker; "" for ours."""
    thing = whole(thing)
    kind = thing if hasattr(thing, "__module__") and hasattr(thing, "__name__") else type(thing)
    module = str(getattr(kind, "__module__", "")).partition(".")[0]
    return "" if module == __name__.partition(".")[0] else module


def summary(thing: object) -> str:
    """The first paragraph of the docstring of ``thing``, on one line; "" where there is none."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def name_of(thing: object) -> str:
    """A display name: the text itself, the thing's ``name`` attribute, or its class's name."""
    if isinstance(thing, str):
        return thing
    thing = whole(thing)
    name = getattr(thing, "name", None)
    return name if isinstance(name, str) else getattr(thing, "__name__", type(thing).__name__)


def parse_spec(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the values and the named values of ``text``: numbers or words.

    Raises ``ValueError`` for anything else.
    """
    name, bracket, arguments = text.strip().partition("(")
    if not bracket:
        return name.strip(), [], {}
    if not arguments.endswith(")"):
        raise ValueError(f"a choice must read NAME or NAME(KEY=VALUE, …), got {text!r}")
    values: list[Any] = []
    options: dict[str, Any] = {}
    for argument in filter(None, (p.strip() for p in arguments[:-1].split(","))):
        key, equals, value = argument.rpartition("=")
        if equals:
            options[key.strip().replace("-", "_")] = _value(value.strip())
        else:
            values.append(_value(argument))
    return name.strip(), values, options


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return float(text) if text.lstrip("+-") in ("nan", "inf") else text
