"""Methods from their names, and from texts such as ``block(length=4)``."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from specmm.extending.kinds import shown
from specmm.extending.registry import OPTION, Registry, maker_of, unknown
from specmm.methods.base import Composed, Draft, Methods, Own, TreeName


def make(registry: Registry, method: Any, **options: Any) -> Any:
    """The ``method`` of ``registry`` with ``options``: it is a name, a text NAME(KEY=VALUE, …), or
    the method object itself.

    Raises ``ValueError`` with a suggestion for a name or an option that is not known.
    """
    if isinstance(method, type) or not isinstance(getattr(method, "name", method), str):
        name, place = next(iter(registry.entries.items()))
        raise ValueError(
            f"method must be a name, such as {name}, or a method, such as "
            f"{place.replace(':', '.')}(), got {shown(method)}"
        )
    if isinstance(method, str):
        kind, spelt = _parsed(registry, method)
        options = spelt | options
    else:
        theirs = (
            isinstance(method, Composed) and maker_of(method) and Draft.name in registry.entries
        )
        kind = type(method) if theirs else registry.get(method.name)
        if not isinstance(method, kind):
            raise ValueError(f"method {kind.name!r} must be {kind.__name__} here, got {method}")
    known = [field.name for field in dataclasses.fields(kind)]
    if strange := [option for option in options if option not in known]:
        raise unknown(f"option of {kind.name}", strange[0], known or ["(none)"], OPTION)
    final = kind(**options) if isinstance(method, str) else dataclasses.replace(method, **options)
    if isinstance(registry, Methods):
        registry.check(final)
    return final


def by_hand(
    registry: Registry, method: Any, drafter: Own = None, tree: Own = None, rule: Own = None
) -> Any:
    """``method`` with the given (not None) ``drafter``, ``tree`` and ``rule`` in place of its own;
    a method that drafts nothing becomes ``draft`` with them.

    Raises ``ValueError`` as :func:`make`, and for models whose methods choose none of them.
    """
    resolved = make(registry, method)
    chosen = dict(drafter=drafter, tree=tree, rule=rule)
    parts = {name: value for name, value in chosen.items() if value is not None}
    if not parts:
        return resolved
    if Draft.name not in registry.entries:
        raise ValueError(
            f"{next(iter(parts))} must be None for models without a choice of drafter, tree and "
            f"rule; choose a method: {', '.join(registry)}"
        )
    if parts.keys() & {"tree", "rule"} and hasattr(resolved, "sampled"):
        parts["sampled"] = True  # or neither would be read
    return make(registry, resolved if resolved.drafts else Draft.name, **parts)


# ---- texts


def parse_method(registry: Registry, text: str, options: Sequence[str] = ()) -> Any:
    """The one method that ``text`` names, NAME or NAME(KEY=VALUE, …), with ``options`` KEY=VALUE.

    Raises ``ValueError`` for another number of methods, and for a name, an option or a value that
    is not known.
    """
    kind, given = _parsed(registry, text, options)
    return make(registry, kind.name, **given)


def parse_methods(registry: Registry, text: str) -> list[Any]:
    """Methods separated by commas, as :func:`parse_method` reads each."""
    listed = [parse_method(registry, one) for one in _split(text)]
    if not listed:
        raise ValueError("methods must name at least one, such as ar,lantern++")
    return listed


def _parsed(
    registry: Registry, text: str, options: Sequence[str] = ()
) -> tuple[Any, dict[str, object]]:
    """The class of the method that ``text`` names, and the values of its options."""
    if len(_split(text)) != 1:
        raise ValueError(f"method must be one, got {text!r}")
    name, bracket, rest = text.strip().partition("(")
    if bracket and not rest.endswith(")"):
        raise ValueError(f"a method must read NAME or NAME(KEY=VALUE, …), got {text!r}")
    kind = registry.get(name.strip())
    hints = get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    given: dict[str, object] = {}
    for option in (*_split(rest.removesuffix(")")), *options):
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"a method's option must read KEY=VALUE, got {option!r}")
        key = key.strip().replace("-", "_")
        key = f"{key}_" if key not in known and f"{key}_" in known else key  # lambda is lambda_
        value = value.strip()
        given[key] = _value(key, value, hints[key]) if key in known else value
    return kind, given


def _split(text: str) -> list[str]:
    """Parts of ``text`` between commas outside brackets."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [p.strip() for p in parts if p.strip()]


def _value(key: str, text: str, kind: Any) -> object:
    """``text`` as a value of the option ``key``, which is annotated as ``kind``."""
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise unknown(key, text, get_args(kind))
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key} must be true or false, got {text!r}")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{key} must be {wanted}, got {text!r}") from None
    if int in get_args(kind) and text.isdigit():
        return int(text)
    if text == "None" and type(None) in get_args(kind):
        return None
    return tree_of(text)


def tree_of(text: str) -> TreeName:
    """A tree's name, or numbers "3,2,1" (brackets allowed)."""
    try:
        numbers = ast.literal_eval(text if "," in text else f"({text},)")
    except (ValueError, SyntaxError):
        return text
    numbers = numbers[0] if isinstance(numbers[0], tuple) else numbers
    if not all(isinstance(n, int) for n in numbers):
        raise ValueError(f"tree must be a name or whole numbers such as 3,2,1, got {text!r}")
    return tuple(numbers)
