"""``pytest tests/golden --record`` keeps what the calls give now, after a change that is meant."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden import calls, tiny_calls
from tests.golden.calls import Found

CALLS = calls.calls() | tiny_calls.calls()
FOLDER = Path(__file__).parent
TOKENS, REPORTS = FOLDER / "tokens.json", FOLDER / "reports.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="keep what calls of tests/golden give")


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Iterator[dict[str, Found] | None]:
    """Where to put what calls give; None where they are compared with what is kept."""
    if not request.config.getoption("--record", default=False):
        yield None
        return
    found: dict[str, Found] = {}
    yield found
    write(TOKENS, {name: each.tokens for name, each in found.items()})
    write(REPORTS, {name: each.report for name, each in found.items()})


def write(file: Path, found: dict[str, Any]) -> None:
    """A line for each call; those that were not made keep theirs, and those that are gone go."""
    kept = json.loads(file.read_text()) | shortened(found)
    rows = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in CALLS if name in kept)
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def shortened(found: Any) -> Any:
    """Vectors and total variations to four decimals, all else as it is."""
    if isinstance(found, dict):
        return {name: shortened(value) for name, value in found.items()}
    if isinstance(found, list):
        return [shortened(value) for value in found]
    return round(found, 4) if isinstance(found, float) else found
