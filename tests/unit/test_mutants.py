"""The list of mutations fits the tree, and the script that tries them tells what became of each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.mutants.lists import misfits, read

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "mutants"
LISTS = sorted(HERE.glob("*.toml"))


def test_the_list_fits_the_tree() -> None:
    mutations = read(LISTS)
    assert sum(not m.equivalent for m in mutations) >= 80
    assert misfits(ROOT, mutations) == []
    assert len({(m.file, m.before, m.after) for m in mutations}) == len(mutations)


def test_the_tests_named_are_there() -> None:
    for mutation in read(LISTS):
        for test in mutation.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            assert not name or re.search(rf"^def {name.partition('[')[0]}\(", text, re.M), test


CODE = """
def double(x):
    if x == 0:
        return 0
    return x + x
"""
TEST = """
from specmm.toy import double

HALF = double(3) // 2

def test_three():
    assert double(3) == 6

def test_zero():
    assert double(0) == 0
"""
CHANGES = {  # after, whether it is called equivalent, what must be said of it
    "tripled": ("return x + 2 * x", "", "killed"),
    "squared": ("return x * 2", "a product of two is a sum", "equivalent"),
    "not the same": ("return x * x", "they say", "error"),
    "for ever": ("while True: pass", "", "timeout"),
}


def entry(what: str, before: str, after: str, equivalent: str, test: str) -> str:
    reason = f'equivalent = "{equivalent}"\n' if equivalent else ""
    return (
        f'[[mutation]]\nfile = "specmm/toy.py"\nwhat = "{what}"\n'
        f'before = "{before}"\nafter = "{after}"\n'
        f'tests = ["tests/test_toy.py{test}"]\n{reason}'
    )


def toy(root: Path, *entries: str) -> list[str]:
    """A tree with a list of mutations: what to run on it."""
    for folder in ("specmm", "tests"):
        (root / folder).mkdir()
    (root / "specmm" / "__init__.py").touch()
    (root / "specmm" / "toy.py").write_text(CODE)
    (root / "tests" / "test_toy.py").write_text(TEST)
    (root / "list.toml").write_text("\n".join(entries))
    options = ["--jobs", "2", "--least", "1", "--root", str(root)]
    return [sys.executable, str(HERE / "run.py"), *options, str(root / "list.toml")]


def test_every_outcome_is_told(tmp_path: Path) -> None:
    whole = "return x + x"
    made = [entry(what, whole, after, why, "") for what, (after, why, _) in CHANGES.items()]
    made.append(entry("not collected", "def double(x):", "1 / 0\\n\\ndef double(x):", "", ""))
    blind = entry("zero is one", "return 0", "return 1", "", "::test_three")
    command = toy(tmp_path, *made, blind)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    wanted = {what: status for what, (_, _, status) in CHANGES.items()}
    wanted |= {"zero is one": "survived", "not collected": "error"}
    for what, status in wanted.items():
        line = rf"^{status} +specmm/toy.py: {what}$"
        assert re.search(line, done.stdout, re.M), done.stdout + done.stderr
    assert done.returncode == 1
    assert (tmp_path / "specmm" / "toy.py").read_text() == CODE, "the tree itself is left alone"


def test_a_list_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    gone = entry("gone", "return 2 * x", "return x", "", "")
    twice = entry("twice", "return ", "yield ", "", "")
    done = subprocess.run(toy(tmp_path, gone, twice), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "gone: the text before must occur once, found 0 times" in done.stderr
    assert "twice: the text before must occur once, found 2 times" in done.stderr
