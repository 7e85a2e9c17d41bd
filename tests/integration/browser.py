"""A real browser for tests of pages."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000  # milliseconds, for a busy machine
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 1000}
SERIOUS = ("serious", "critical")


def browser_here() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


needs_browser = pytest.mark.skipif(
    browser_here() is None, reason=f"needs one of {', '.join(BROWSERS)}"
)


def look(page: Any, name: str) -> None:
    """Keep a screenshot where SPECMM_SCREENSHOTS says, for people."""
    if os.environ.get("SPECMM_SCREENSHOTS"):
        page.screenshot(path=Path(os.environ["SPECMM_SCREENSHOTS"]) / f"{name}.png", full_page=True)


def serious_findings(page: Any) -> list[str]:
    """What axe finds on the page that keeps people from using it."""
    axe = pytest.importorskip("axe_playwright_python")
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{v['impact']} {v['id']}: {node['html'][:200]}"
        for v in found
        for node in v["nodes"]
        if v["impact"] in SERIOUS
    ]
