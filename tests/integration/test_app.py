"""The app in a real browser: every tab, a phone, a bad file, two people, a reload in
the middle, no stranger asked.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from specmm.app.models import AppModels
from tests.integration.browser import (
    DESKTOP,
    PATIENCE,
    PHONE,
    browser_here,
    look,
    needs_browser,
    serious_findings,
)

pytestmark = needs_browser


@pytest.fixture(scope="module")
def address(tiny: Path, text_folder: Path) -> Iterator[str]:
    from specmm.app.page import build, serve

    app = build(AppModels((str(tiny), str(text_folder)), only=("pocket/llava",), anything=True))
    yield serve(app, wait=False)
    app.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=browser_here(), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    hosts: set[str] = set()
    page = browser.new_page(viewport=DESKTOP)
    page.set_default_timeout(PATIENCE)
    page.on(
        "request",
        lambda request: hosts.add(request.url.split("/")[2] if "://" in request.url else ""),
    )
    page.goto(address)
    yield page
    assert hosts <= {address.split("/")[2], ""}  # nothing but this machine was asked
    page.close()


def click(page: Any, button: str) -> None:
    page.get_by_role("button", name=button, exact=True).locator("visible=true").click()


def raced(page: Any) -> Any:
    """The line of the race that has ended."""
    found = page.get_by_text("times as fast as").locator("visible=true")
    found.wait_for()
    return found


@pytest.mark.slow
def test_two_methods_race_and_a_reload(page, tmp_path):
    from specmm.image_ar.records import read_record

    click(page, "Race")
    page.reload()  # in the middle
    click(page, "Race")
    raced(page)
    look(page, "pictures")
    assert page.get_by_text("Certificate: exact").count() == 2
    assert page.get_by_label("Share").count() == 0  # which would send the picture away
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG with its record").last.click()
    download.value.save_as(tmp_path / "saved.png")
    assert read_record(tmp_path / "saved.png")["method"] == "speculative"


@pytest.mark.slow
def test_a_trace_of_one_round(page):
    click(page, "Race")
    raced(page)
    page.get_by_role("button", name="One round").locator("visible=true").click()
    page.get_by_role("img", name="A tree of").wait_for()
    page.get_by_role("cell", name="the target's own").wait_for()
    look(page, "trace")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tab", "button"), [("", "Race"), ("Questions", "Ask"), ("Completion", "Continue")]
)
def test_a_phone_sees_results_within_one_screen(page, tab, button):
    """All tabs are there, and what both methods drew or wrote."""
    page.set_viewport_size(PHONE)
    if tab:
        page.get_by_role("tab", name=tab).click()
    click(page, button)
    verdict = raced(page)
    pictures = [page.get_by_alt_text(f"{name} picture") for name in ("First", "Second")]
    made = page.locator(".answer").locator("visible=true").all() if tab else pictures
    lines = page.get_by_text("Certificate:").locator("visible=true").all()
    assert len(made) == len(lines) == 2
    look(page, f"phone-{tab.lower()}" if tab else "phone")
    boxes = [part.bounding_box() for part in (verdict, *lines, *made)]
    assert all(box["y"] >= 0 and box["y"] + box["height"] <= PHONE["height"] for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.slow
def test_a_question_and_a_bad_file(page, tmp_path):
    (tmp_path / "bad.png").write_text("no picture")
    page.get_by_role("tab", name="Questions").click()
    upload = (
        page.locator("input[type=file]")
        .locator("visible=true")
        .or_(page.locator("input[type=file]"))
    )
    upload.first.set_input_files(tmp_path / "bad.png")
    page.get_by_text("bad.png must be a picture, got a file of another kind").first.wait_for()
    assert page.get_by_text("Traceback").count() == 0
    look(page, "bad-file")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "good.png")
    upload.first.set_input_files(tmp_path / "good.png")
    click(page, "Ask")
    raced(page)
    assert page.locator(".answer mark").count() > 0
    assert page.get_by_text("Certificate: exact").count() == 2
    look(page, "answer")
    page.set_viewport_size(PHONE)
    look(page, "answer-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.slow
def test_any_model_may_be_typed_here(page, tiny):
    page.get_by_label("Model or hub id").locator("visible=true").fill("no/such model")
    page.keyboard.press("Enter")
    page.get_by_text("no/such model").first.wait_for()
    assert page.get_by_text("Traceback").count() == 0


@pytest.mark.slow
def test_another_model_brings_its_settings(page):
    page.get_by_label("Model or hub id").locator("visible=true").fill("pocket/var")
    page.keyboard.press("Enter")
    second = page.get_by_label("Second method").locator("visible=true")
    page.wait_for_function("found => found.value == 'code(n=2)'", arg=second.element_handle())
    assert page.get_by_label("Seed").locator("visible=true").input_value() == "2"


@pytest.mark.slow
def test_the_benchmark_plots_what_it_measures(page):
    page.get_by_role("tab", name="Benchmark").click()
    click(page, "Measure here")
    page.get_by_role("cell", name="exact").first.wait_for()
    look(page, "benchmark")


@pytest.mark.slow
def test_two_people_at_once(page, browser, address):
    other = browser.new_page()
    other.set_default_timeout(PATIENCE)
    other.goto(address)
    for each in (page, other):
        click(each, "Race")
    for each in (page, other):
        raced(each)
    other.close()


def measured(page: Any) -> None:
    """Wait for the benchmark's table."""
    page.get_by_role("cell", name="exact").first.wait_for()


TABS = [
    ("Pictures", "Race", raced, PHONE),
    ("Questions", "Ask", raced, DESKTOP),
    ("Completion", "Continue", raced, DESKTOP),
    ("Benchmark", "Measure here", measured, PHONE),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tab", "button", "ended", "size"), TABS, ids=[tab for tab, *_ in TABS])
def test_nothing_keeps_people_from_using_it(page, tab, button, ended, size):
    """By axe, of every tab: as it opens, after a run, and with all that folds open."""
    page.set_viewport_size(size)
    name = f"axe-{tab.lower()}-{size['width']}"
    page.get_by_role("tab", name=tab).click()
    page.get_by_role("button", name=button, exact=True).locator("visible=true").wait_for()
    assert serious_findings(page) == []
    click(page, button)
    ended(page)
    look(page, name)
    assert serious_findings(page) == []
    for folded in ("The model's parameters", "One round"):
        for each in page.get_by_role("button", name=folded).locator("visible=true").all():
            each.click()
    page.wait_for_timeout(500)  # they unfold
    look(page, f"{name}-open")
    assert serious_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"\">')")
    assert serious_findings(page) != []  # a picture without a description is noticed
