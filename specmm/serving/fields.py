"""Fields of a request's JSON, each read once and checked; unknown fields are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specmm.extending.kinds import shown
from specmm.extending.registry import unknown


class Refused(ValueError):
    """A refused request: the reason as a sentence, the field at fault (``param``), and the
    ``status`` and ``code`` of the response.
    """

    def __init__(
        self, why: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(why)
        self.param = param
        self.status = status
        self.code = code


class Fields:
    """The fields of a JSON object ``given``, at ``place`` in the request ("": the whole request). A
    field that is null counts as missing.

    Each method raises :class:`Refused` for a value of another kind.
    """

    def __init__(self, given: Any, place: str = "") -> None:
        if not isinstance(given, dict):
            raise Refused(
                f"{place or 'the request'} must be a JSON object, got {shown(given)}", place or None
            )
        self.given = given
        self.place = place
        self.known: set[str] = set()

    def path(self, name: str) -> str:
        """The full name of a field in the request."""
        return f"{self.place}.{name}" if self.place else name

    def wrong(self, name: str, wanted: str, got: Any) -> Refused:
        """The error for a field that must be ``wanted``."""
        path = self.path(name)
        return Refused(f"{path} must be {wanted}, got {shown(got)}", path)

    def any(self, name: str) -> Any:
        """The value of a field; None if it is not there."""
        self.known.add(name)
        return self.given.get(name)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number in a range."""
        value = self.any(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and least <= value <= most):
            raise self.wrong(name, f"a whole number from {least} to {most}", value)
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number in a range."""
        value = self.any(name)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (real and least <= value <= most):
            raise self.wrong(name, f"a number from {least:g} to {most:g}", value)
        return value

    def flag(self, name: str) -> bool:
        """True or false; false if it is not there."""
        value = self.any(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return bool(value)

    def text(self, name: str, among: Sequence[str] = ()) -> str | None:
        """A text, one of those ``among`` if there are any."""
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "a text", value)
        if among and value not in among:
            raise Refused(str(unknown(self.path(name), value, among)), self.path(name))
        return value

    def items(self, name: str) -> list[Any]:
        """A list; empty if it is not there."""
        value = self.any(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "a list", value)
        return value or []

    def inner(self, name: str) -> Fields | None:
        """A field that is an object itself."""
        value = self.any(name)
        return None if value is None else Fields(value, self.path(name))

    def ignore(self, *names: str) -> None:
        """Accept fields that change no answer."""
        self.known.update(names)

    def only(self, why: str, **usual: Any) -> None:
        """Refuse fields with another value than the ``usual`` one, saying what to do instead."""
        for name, value in usual.items():
            got = self.any(name)
            if got is not None and got != value:
                raise self.wrong(name, f"{shown(value)} or left out ({why})", got)

    def done(self) -> None:
        """Refuse fields that nobody has read, with the nearest known name."""
        for name, value in self.given.items():
            if name not in self.known and value is not None:
                raise Refused(str(unknown("field", self.path(name), self._paths())), name)

    def _paths(self) -> list[str]:
        return [self.path(name) for name in self.known]
