"""The demos of the families: each is a Space, and each races in a browser."""

import json
import runpy
from pathlib import Path

import gradio
import pytest

from specmm import zoo
from tests.integration.browser import PATIENCE, browser_here, needs_browser, serious_findings

DEMOS = Path(__file__).parents[2] / "demos"
SPACES = sorted(file.parent for file in DEMOS.glob("*/app.py"))
names = pytest.mark.parametrize("folder", SPACES, ids=lambda folder: folder.name)


def header(folder: Path) -> dict[str, str]:
    """The lines that a Space reads at the top of its README."""
    _, lines, _ = (folder / "README.md").read_text().split("---\n", 2)
    return dict(line.split(": ", 1) for line in lines.splitlines())


def test_every_family_of_pocket_models_has_a_demo() -> None:
    texts = "".join((folder / "app.py").read_text() for folder in SPACES)
    for family in ("llamagen", "mar", "var", "llava", "coder"):
        assert f'"pocket/{family}"' in texts and f"pocket/{family}" in zoo.pocket_models()


@names
def test_a_demo_is_a_space(folder: Path) -> None:
    facts = header(folder)
    assert facts["sdk"] == "gradio" and (folder / facts["app_file"]).is_file()
    assert facts["sdk_version"].split(".")[0] == gradio.__version__.split(".")[0]
    assert (folder / "requirements.txt").read_text().startswith("specmm[app]")


@pytest.mark.slow
@needs_browser
@names
def test_a_demo_races(folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    from specmm.app.page import serve

    app = runpy.run_path(str(folder / "app.py"))["app"]
    address = serve(app, wait=False)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=browser_here(), args=["--no-sandbox"]
            )
            page = browser.new_page()
            page.set_default_timeout(3 * PATIENCE)
            page.goto(address)
            page.locator("button.primary").locator("visible=true").first.click()
            page.get_by_text("times as fast as").locator("visible=true").wait_for()
            assert serious_findings(page) == [], json.dumps(serious_findings(page), indent=1)
            browser.close()
    finally:
        app.close()
