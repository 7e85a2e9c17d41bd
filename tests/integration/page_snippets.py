"""The code of the README and the pages, as a test runs it.

Blocks of Python of one page run one after the other in one namespace, blocks of ``sh`` line by
line: ``specmm`` commands in this process, and of what needs a network or hours (``pip install``,
``make``, ``torchrun``) that it exists. A comment before a block changes what is run, not what is
read:

- ``<!-- test: add --set steps=2 -->`` adds words to each ``specmm`` line, in place of its own
  settings of these names;
- ``<!-- test: parse -->`` only reads each ``specmm`` line's options, for what takes hours.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import typer.main
from typer.testing import CliRunner

from specmm.cli import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:^<!-- test: (?P<told>[^\n]*) -->\n+)?^```(?P<kind>[\w-]*)[^\n]*\n(?P<code>.*?)^```",
    re.M | re.S,
)
EXTRA = re.compile(r"(?:\.|specmm[\w.-]*)\[([\w,]+)\]")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its line in the file, what the test was told."""

    kind: str
    code: str
    line: int
    told: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    return [
        Block(m["kind"], m["code"], text[: m.start("code")].count("\n"), m["told"] or "")
        for m in FENCE.finditer(text)
    ]


def run_page(page: Path) -> int:
    """Run all blocks in the current folder; the number of blocks that ran."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for block in blocks(page):
        if block.kind == "python":
            code = "\n" * block.line + block.code  # so that a traceback names the page's line
            exec(compile(code, str(page), "exec"), namespace)
        elif block.kind == "sh":
            for line in commands(block.code):
                run_line(line, block.told)
        else:
            continue
        ran += 1
    return ran


def commands(code: str) -> list[list[str]]:
    """The words of each command; comments and blank lines are left out."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def run_line(words: list[str], told: str) -> None:
    """Run a ``specmm`` command, or see that what another one names exists."""
    match words:
        case [setting, *rest] if re.fullmatch(r"[A-Z_]+=\S*", setting):
            run_line(rest, told)
        case ["specmm", *rest] if told == "parse":
            parse(rest)
        case ["specmm", *rest]:
            done = CliRunner().invoke(app, with_added(rest, told))
            assert done.exit_code == 0, (words, done.output, done.stderr, done.exception)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target
        case ["pip", "install", *packages]:
            check_extras(" ".join(packages))
        case ["torchrun", *rest]:
            parse(rest[rest.index("specmm") + 1 :])
        case ["python", "-m", module, *_]:
            name = module.replace(".", "/")
            assert (ROOT / f"{name}.py").is_file() or (ROOT / name / "__main__.py").is_file()
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), script
        case ["export", *_]:
            pass
        case _:
            raise AssertionError(f"no test knows how to run {words}")


def with_added(words: list[str], told: str) -> list[str]:
    """``words`` with those that the test was ``told`` to add."""
    if not told.startswith("add "):
        return words
    added = shlex.split(told.removeprefix("add"))
    names = tuple(word.partition("=")[0] + "=" for word in added if "=" in word)
    return [*(word for word in words if not word.startswith(names)), *added]


def check_extras(packages: str) -> None:
    """Every extra that a ``pip install`` line names is one of ours."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for found in EXTRA.finditer(packages):
        unknown = set(found[1].split(",")) - set(declared["optional-dependencies"])
        assert not unknown, unknown


def parse(words: list[str]) -> None:
    """Read the options of a ``specmm`` command as it would, without running it."""
    command: click.Command = typer.main.get_command(app)
    context = command.make_context("specmm", list(words), resilient_parsing=False)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, context._protected_args + context.args)
        assert found is not None, words
        command, context = found, found.make_context(name, rest, parent=context)
