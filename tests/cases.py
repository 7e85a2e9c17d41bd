"""Cases of a test of which ``make test`` runs some, and ``make test-all`` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """``cases``, of which all but the ``fast`` ones are marked slow; a tuple has several values."""

    def values(case: Any) -> tuple[Any, ...]:
        return case if isinstance(case, tuple) else (case,)

    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(*values(case), marks=marks[case in fast]) for case in cases]
