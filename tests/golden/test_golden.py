"""The same tokens for the same seeds as when they were recorded (``calls.py``), by every method of
every family.
"""

import json

import numpy as np
import pytest

from tests.cases import some
from tests.golden import calls as golden

KEPT = json.loads(golden.KEPT.read_text())
CALLS = golden.calls()
SLOW = {  # variants of methods whose other calls `make test` makes
    *(f"continuous: {name}" for name in ("paper", "release", "aligned")),
    *(f"tokens: sjd, {name}" for name in ("last", "drawn afresh")),
    *(f"tokens: speculative, {name}" for name in ("token by token", "eagle")),
    *(f"tokens: {name}" for name in ("lantern, block", "lantern++, lambda 4")),
    "tokens: lantern++, release",
    *(f"tokens, greedy: {name}" for name in ("ar", "lantern++")),
    *(f"text at 0.0: {name}" for name in ("specdiff", "deer, tree")),
    *(f"text at 0.0: block, {name}" for name in ("drawn tree", "recall")),
}


def test_every_call_is_kept() -> None:
    assert set(KEPT) == set(CALLS) > SLOW


@pytest.mark.parametrize("name", some(CALLS, {*CALLS} - SLOW))
def test_tokens_are_those_recorded(name: str) -> None:
    found, kept = CALLS[name](), KEPT[name]
    if name.startswith("continuous"):
        np.testing.assert_allclose(found, kept, atol=1e-3)
    else:
        assert found == kept
