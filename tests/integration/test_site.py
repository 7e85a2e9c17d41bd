"""The documentation site: it builds, and in a real browser nothing keeps people from using it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.browser import (
    PATIENCE,
    PHONE,
    browser_here,
    look,
    needs_browser,
    serious_findings,
)

ROOT = Path(__file__).parents[2]
PAGES = ("index.html", "quickstart/index.html", "methods/index.html", "measured/index.html")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: Any) -> Path:
    pytest.importorskip("mkdocs")
    folder: Path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_it_builds_without_a_warning_and_asks_no_other_machine(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert "images/gain.svg" in home
    assert "https://" not in re.sub(r"<a [^>]*>", "", home)


@needs_browser
def test_nothing_keeps_people_from_reading_it(site: Path) -> None:
    """By axe, of pages of each kind on a phone: text, commands, and tables wider than it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_here(), args=["--no-sandbox"])
        page = browser.new_page(viewport=PHONE)
        page.set_default_timeout(PATIENCE)
        for name in PAGES:
            page.goto((site / name).as_uri())
            page.locator("h1").first.wait_for()
            look(page, f"site-{name.split('/')[0]}-{PHONE['width']}")
            assert serious_findings(page) == [], name
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
        page.goto((site / PAGES[0]).as_uri())
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"\">')")
        assert serious_findings(page) != []  # a picture without a description is noticed
        browser.close()
