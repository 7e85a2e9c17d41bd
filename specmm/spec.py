"""Choices as text: a name, or a name with options in brackets, as ``typical(epsilon=0.2)``."""

from __future__ import annotations

import ast
from typing import Any


def parse_spec(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the values and the named values of ``text``; all values are numbers or words.

    Raises ``ValueError`` for anything else.
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name.strip(), [], {}
    if not rest.endswith(")"):
        raise ValueError(f"a choice must read NAME or NAME(KEY=VALUE, …), got {text!r}")
    values, options = list[Any](), dict[str, Any]()
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
