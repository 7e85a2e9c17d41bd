"""Checks of arguments that raise an error of one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

MOST = 3.4e38  # larger numbers are infinite in float32


def shown(value: object) -> str:
    """``value`` for an error message: numbers and short texts themselves, other values by type."""
    if value is None or (isinstance(value, str | int | float) and len(repr(value)) <= 60):
        return repr(value)
    if isinstance(value, type):
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def check_numbers(**values: object) -> None:
    """Raise ``ValueError`` naming the first of ``values`` that is not a number."""
    for name, value in values.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number, got {shown(value)}")


def check_at_least(least: float, hint: str = "", /, **values: Any) -> None:
    """Raise ``ValueError``, with a ``hint``, naming the first of ``values`` that is not a finite
    number of at least ``least``.
    """
    check_numbers(**values)
    for name, value in values.items():
        # PyTorch takes no longer whole numbers
        if not least <= value <= (2**63 - 1 if isinstance(value, Integral) else MOST):
            got = shown(value)
            raise ValueError(f"{name} must be finite and at least {least}, got {got}{hint}")


def check_whole(**values: object) -> None:
    """Raise ``ValueError`` naming the first of ``values`` that is not a whole number."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} must be a whole number, got {shown(value)}")


def check_flags(**values: object) -> None:
    """Raise ``ValueError`` naming the first of ``values`` that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {shown(value)}")


def check_kind(kind: Any, **values: object) -> None:
    """Raise ``ValueError`` naming the first of ``values`` that does not fit the annotation
    ``kind``, a number or one of several texts; other annotations are not checked.
    """
    if kind in ("int", int):
        check_whole(**values)
    elif kind in ("float", float):
        check_numbers(**values)
    elif get_origin(kind) is Literal:
        for name, value in values.items():
            if not isinstance(value, str) or value not in get_args(kind):
                names = ", ".join(get_args(kind))
                raise ValueError(f"{name} must be one of {names}, got {shown(value)}")


def texts_of(name: str, given: object) -> list[str]:
    """One text or several, an argument called ``name``, as a list.

    Raises ``ValueError`` for values that are not texts.
    """
    # what has no order, or numbers in one, is no list of texts
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping, Set))
    several = several and getattr(given, "ndim", 1) > 0
    texts: list[Any] = list(given) if several else [given]  # type: ignore[call-overload]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"{name} must be a text or a list of texts, got {shown(text)}{_of_chats(text)}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} must be letters of Unicode, got half a surrogate pair; decode the bytes "
                "that it comes from with errors='replace'"
            ) from error
    return texts


def _of_chats(value: object) -> str:
    """Advice for a ``value`` that is a chat or a chat's message; empty for anything else."""
    first = next(iter(value), None) if isinstance(value, list | tuple) else value
    if not (isinstance(first, Mapping) and "role" in first):
        return ""
    return "; give a chat as messages=…"


def either(name: str, value: Any, other: str, same: Any) -> Any:
    """The value of the option ``name``, which may be given under its other name ``other``.

    Raises ``ValueError`` if both are given.
    """
    if value is not None and same is not None:
        raise ValueError(f"give {name} or {other}, which mean the same, got both")
    return same if value is None else value
