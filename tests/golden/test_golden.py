"""The same tokens for the same seeds as when they were recorded (``calls.py``), by every method of
every family.
"""

import json

import numpy as np
import pytest

from tests.cases import some
from tests.golden.calls import Found
from tests.golden.conftest import CALLS, REPORTS, TOKENS

KEPT, REPORTED = (json.loads(file.read_text()) for file in (TOKENS, REPORTS))
SLOW = {  # variants of methods whose other calls `make test` makes
    "continuous: release",
    *(f"tokens: sjd, {name}" for name in ("last", "drawn afresh")),
    *(f"tokens: speculative, {name}" for name in ("token by token", "eagle")),
    *(f"tokens: {name}" for name in ("lantern, block", "lantern++, lambda 4")),
    "tokens: lantern++, release",
    *(f"tokens, greedy: {name}" for name in ("ar", "lantern++")),
    *(f"text at 0.0: {name}" for name in ("specdiff", "deer, tree")),
    *(f"text at 0.0: block, {name}" for name in ("drawn tree", "recall")),
    *(name for name in CALLS if name.startswith(("lumina", "classes by 7", "mtp, greedy"))),
}


def test_every_call_is_kept() -> None:
    assert set(KEPT) == set(REPORTED) == set(CALLS) > SLOW


@pytest.mark.parametrize("name", some(CALLS, {*CALLS} - SLOW))
def test_tokens_are_those_recorded(name: str, record: dict[str, Found] | None) -> None:
    """And the run's certificate, and how many tokens its rounds kept."""
    found = CALLS[name]()
    if record is not None:
        record[name] = found
        return
    if name.startswith("continuous"):
        np.testing.assert_allclose(found.tokens, KEPT[name], atol=1e-3)
    else:
        assert found.tokens == KEPT[name]
    report = dict(REPORTED[name])
    *claim, tv = found.report.pop("certificate", [None])
    *wanted, kept_tv = report.pop("certificate", [None])
    assert (claim, found.report) == (wanted, report)
    assert tv == (kept_tv if kept_tv is None else pytest.approx(kept_tv, abs=2e-4))
