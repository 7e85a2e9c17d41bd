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


def test_every_call_is_kept() -> None:
    assert set(KEPT) == set(CALLS)


@pytest.mark.parametrize("name", some(CALLS, {*CALLS} - {"continuous: paper"}))
def test_tokens_are_those_recorded(name: str) -> None:
    found, kept = CALLS[name](), KEPT[name]
    if name.startswith("continuous"):
        np.testing.assert_allclose(found, kept, atol=1e-3)
    else:
        assert found == kept
