"""The app in a real browser: every tab, a bad file, two people at once, a reload in the middle, no
stranger asked.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import specmm
from specmm import zoo
from specmm.app.models import AppModels
from specmm.app.streams import DRAFT, Frame, PictureStream, text_pieces
from specmm.hf.running import RoundText

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000  # milliseconds, for a busy machine


def browser_here() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


needs_browser = pytest.mark.skipif(
    browser_here() is None, reason=f"needs one of {', '.join(BROWSERS)}"
)


@pytest.fixture(scope="module")
def address(tiny: Path) -> Iterator[str]:
    from specmm.app.page import build, serve

    app = build(AppModels((str(tiny),)))
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
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(PATIENCE)
    page.on(
        "request",
        lambda request: hosts.add(request.url.split("/")[2] if "://" in request.url else ""),
    )
    page.goto(address)
    yield page
    assert hosts <= {address.split("/")[2], ""}  # nothing but this machine was asked
    page.close()


def drawn(page: Any, count: int = 2) -> None:
    """Wait until ``count`` sides are finished."""
    page.get_by_text("tokens in").nth(count - 1).wait_for()


def look(page: Any, name: str) -> None:
    """Keep a screenshot where SPECMM_SCREENSHOTS says, for people."""
    if os.environ.get("SPECMM_SCREENSHOTS"):
        page.screenshot(path=Path(os.environ["SPECMM_SCREENSHOTS"]) / f"{name}.png", full_page=True)


@needs_browser
def test_pictures_side_by_side_and_a_reload(page: Any, tmp_path: Path) -> None:
    from specmm.jobs.folder import description

    page.get_by_role("button", name="Draw").click()
    page.reload()  # in the middle
    page.get_by_role("button", name="Draw").click()
    drawn(page)
    look(page, "pictures")
    assert page.get_by_label("Share").count() == 0  # which would send the picture away
    with page.expect_download() as download:
        page.locator("a[download]").last.click()
    download.value.save_as(tmp_path / "saved.png")
    assert description(tmp_path / "saved.png")["method"] == "lantern++"
    page.set_viewport_size({"width": 390, "height": 844})
    look(page, "phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@needs_browser
def test_a_question_and_a_bad_file(page: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    page.get_by_role("tab", name="Questions").click()
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("a question needs a picture").first.wait_for()
    upload = page.locator("input[type=file]").first
    upload.set_input_files(tmp_path / "bad.png")
    page.get_by_text("bad.png must be a picture, got a file of another kind").first.wait_for()
    assert page.get_by_text("Traceback").count() == 0
    look(page, "bad-file")
    page.reload()
    page.get_by_role("tab", name="Questions").click()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "good.png")
    page.locator("input[type=file]").first.set_input_files(tmp_path / "good.png")
    page.get_by_text("good").first.wait_for()
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("rounds,").last.wait_for()
    look(page, "answer")


@needs_browser
def test_the_benchmark_plots_what_it_measures(page: Any) -> None:
    page.get_by_role("tab", name="Benchmark").click()
    page.get_by_role("button", name="Measure here").click()
    page.get_by_role("gridcell", name="exact").first.wait_for()
    look(page, "benchmark")


@needs_browser
def test_two_people_at_once(page: Any, browser: Any, address: str) -> None:
    other = browser.new_page()
    other.set_default_timeout(PATIENCE)
    other.goto(address)
    for each in (page, other):
        each.get_by_role("button", name="Draw").click()
    for each in (page, other):
        drawn(each)
    other.close()


# ---- without a browser


def test_frames_show_what_was_accepted() -> None:
    grid = Frame([3, 4, 8], 9, 0.5).grid(3)
    cells = [grid.getpixel((x * 20 + 5, y * 20 + 5)) for y in range(3) for x in range(3)]
    blue, green, grey = cells[0], cells[1], cells[8]
    assert (
        cells == [blue, green, blue, blue, green, green, green, blue, grey]
        and len({blue, green, grey}) == 3
    )


def test_a_drawing_that_is_left_stops(tiny: Path) -> None:
    pipe = AppModels((str(tiny),)).get("images", str(tiny))
    frames = PictureStream(pipe, "ar", "heart", 0).run()
    next(frames)
    frames.close()
    assert threading.active_count() < 50
    with pytest.raises(ValueError, match="did you mean"):
        list(PictureStream(pipe, "specualtive", "heart", 0).run())


def test_answers_set_accepted_drafts_apart() -> None:
    rounds = [
        RoundText([("abc", True), ("def", False)], 3),
        RoundText([], 1),
        RoundText([("xyz", False)], 1),
    ]
    *_, (pieces, line) = text_pieces(iter([[said] for said in rounds]))
    assert pieces == [("abc", DRAFT), ("def", None), ("xyz", None)] and line.startswith(
        "5 tokens in 3 rounds"
    )


def test_only_listed_models_are_loaded() -> None:
    with pytest.raises(ValueError, match="model must be one of"):
        AppModels().get("images", "/etc")
    with pytest.raises(ValueError, match="folder or a pocket model"):
        AppModels(("no/such",))
    assert "pocket/llava" in AppModels().names["questions"] and set(
        AppModels().names["images"]
    ) <= set(zoo.pocket_models())


@pytest.mark.parametrize("name", ["pocket/mar", "pocket/var"])
def test_pictures_of_every_family_are_streamed(name: str) -> None:
    pipe = specmm.ImagePipeline.from_pretrained(name)
    pipe.set_progress_bar_config(disable=True)
    *_, last = PictureStream(pipe, "ar", pipe.settings.classes[0], 0).run()
    assert last is not None and pipe.grid >= 0
