"""Methods and their options from text: ``lantern++`` with ``lambda_=2``, or ``lantern++(lambda_=2,
k=10)``.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from specmm import methods
from specmm.registry import Registry, unknown


def parse_method(registry: Registry, name: str, options: Sequence[str] = ()) -> Any:
    """The method ``name`` of ``registry`` with ``options`` "KEY=VALUE"; ``ValueError`` for anything
    not known.
    """
    kind = registry.get(name)
    hints = get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise ValueError(f"a method's option must read KEY=VALUE, got {option!r}")
        key = key.strip().replace("-", "_")
        key = f"{key}_" if key not in known and f"{key}_" in known else key  # lambda is lambda_
        key = methods.current_option(kind, key)
        given[key] = _value(key, text.strip(), hints[key]) if key in known else text
    return methods.make(registry, name, **given)


def parse_methods(registry: Registry, text: str) -> list[Any]:
    """Methods separated by commas, each a name or name(key=value, …)."""
    found = []
    for item in _split(text):
        name, bracket, rest = item.partition("(")
        if bracket and not rest.endswith(")"):
            raise ValueError(f"a method must read NAME or NAME(KEY=VALUE, …), got {item!r}")
        found.append(parse_method(registry, name.strip(), _split(rest[:-1]) if bracket else ()))
    if not found:
        raise ValueError("methods must name at least one, such as ar,lantern++")
    return found


def label(method: Any) -> str:
    """The name, and the options that are not the default ones."""
    changed = [f for f in dataclasses.fields(method) if getattr(method, f.name) != f.default]
    options = ", ".join(f"{f.name}={getattr(method, f.name)}" for f in changed)
    return f"{method.name}({options})" if options else method.name


def _split(text: str) -> list[str]:
    """Parts of ``text`` between commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [p.strip() for p in parts if p.strip()]


def _value(key: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise unknown(key, text, get_args(kind))
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{key} must be true or false, got {text!r}")
        return text == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{key} must be {wanted}, got {text!r}") from None
    if int in get_args(kind) and text.isdigit():
        return int(text)
    return _tree(text)


def _tree(text: str) -> methods.Tree:
    """A tree's name, or numbers "3,2,1" (brackets allowed)."""
    try:
        numbers = ast.literal_eval(text if "," in text else f"({text},)")
    except (ValueError, SyntaxError):
        return text
    numbers = numbers[0] if isinstance(numbers[0], tuple) else numbers
    if not all(isinstance(n, int) for n in numbers):
        raise ValueError(f"tree must be a name or whole numbers such as 3,2,1, got {text!r}")
    return tuple(numbers)
