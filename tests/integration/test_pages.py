"""Whatever the README and the pages show runs, and their numbers are those that were measured."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import pages
from specmm.extending.registry import REGISTERED
from tests.integration.page_files import Maker, write_files
from tests.integration.page_snippets import ROOT, blocks, run_page

DOCS = ROOT / "docs"
GENERATED = {"models.md", "janus.md"}  # a benchmark's table; the card of a model that is not here
PAGES = sorted(p for p in DOCS.rglob("*.md") if p.name not in GENERATED)
# the others train, time, or answer at length
QUICK = {"certificates.md", "drafter.md"}
NOTEBOOKS = sorted((ROOT / "demos" / "notebooks").glob("*.ipynb"))
# what makes a notebook's numbers good takes minutes: a test does with less of it
LESS = {
    "1_first_pictures": {r"\"food-fruit\", \"face-smiling\", ": ""},
    "4_a_drafter_from_nothing": {"560": "12", "steps=420": "steps=4", "scenes=10": "scenes=1"}
    | {"prompt=2": "prompt=1", "tokens=96": "tokens=16"},
    "5_fid_done_right": {"64": "8"},
    "7_a_drafter_from_chats": {"120": "20", "steps=150": "steps=4", "range(9)": "range(2)"}
    | {"questions=8": "questions=2", "tokens=96": "tokens=16"},
    # Ray itself is for test_batch_ray.py
    "6_a_job_on_ray": {r", \"--engine\", \"ray\", \"--workers\", \"1\"": ""},
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which snippets run; what they register is forgotten."""
    monkeypatch.chdir(tmp_path)
    for kind in REGISTERED:
        monkeypatch.setitem(REGISTERED, kind, {})
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return tmp_path


def test_snippets_of_the_readme_run(workplace: Path, make_tiny: Maker) -> None:
    write_files(pages.README.read_text(), make_tiny)
    assert run_page(ROOT / "README.md") > 3


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            p, id=str(p.relative_to(DOCS)), marks=() if p.name in QUICK else pytest.mark.slow
        )
        for p in PAGES
    ],
)
def test_snippets_of_a_page_run(page: Path, workplace: Path, make_tiny: Maker) -> None:
    write_files(page.read_text(), make_tiny)
    told = [b for b in blocks(page) if b.kind in ("python", "sh")]
    assert run_page(page) == len(told)
    assert all(b.kind in ("python", "sh", "text", "json", "toml") for b in blocks(page)), page


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(notebook: Path, workplace: Path, make_tiny: Maker) -> None:
    write_files("", make_tiny)
    text = notebook.read_text()
    for much, little in LESS.get(notebook.stem, {}).items():
        assert much in text
        text = text.replace(much, little)
    found = json.loads(text)
    namespace: dict[str, object] = {"__name__": "__main__"}
    cells = [c for c in found["cells"] if c["cell_type"] == "code"]
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{notebook.name}, cell {i}", "exec"), namespace)
    assert len(cells) > 3


def test_there_are_eight_notebooks_without_stored_output() -> None:
    assert len(NOTEBOOKS) == 8
    for file in NOTEBOOKS:
        cells = json.loads(file.read_text())["cells"]
        assert not any(c.get("outputs") for c in cells), file


def test_the_table_and_the_picture_of_the_readme_are_the_results() -> None:
    text = pages.README.read_text()
    assert pages.updated(text) == text, "run python -m benchmarks.pages"
    assert pages.gain_picture() == pages.PICTURE.read_text(), "run python -m benchmarks.pages"


def test_a_row_that_is_not_there_is_refused() -> None:
    nobody = pages.Gain("pictures", "nobody", "speed", "nobody")
    with pytest.raises(ValueError, match=r"speed.json must have a row .*nobody"):
        _ = nobody.row
    with pytest.raises(ValueError, match="must hold"):
        pages.updated("no table")


def test_every_table_of_results_that_a_page_asks_for_is_made() -> None:
    asked = {m for page in PAGES for m in pages.MARKER.findall(page.read_text())}
    assert asked == {*pages.TABLES, *pages.SUMMARIES, "zoo"}
    for page in PAGES:
        assert "<!-- results" not in pages.filled(page.read_text())


def test_pages_hold_no_speed_up_that_was_typed_in() -> None:
    """A number like 2.04× goes stale; pages name the table instead."""
    for page in PAGES:
        assert not re.findall(r"\d\.\d+×", page.read_text()), page


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    written = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert named == written | {p for p in pages.ADDED if p.endswith(".md")}
    assert all((ROOT / source).is_file() for source in pages.ADDED.values())


def test_the_readme_is_short_and_begins_with_pip_install() -> None:
    text = pages.README.read_text()
    assert text.count("\n") <= 150
    assert blocks(pages.README)[0].code.startswith("pip install")
