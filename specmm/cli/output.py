"""What commands print: exactly one JSON value on stdout if asked for, tables for people, and files
written whole.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from specmm.files import writable as writable
from specmm.files import write_whole


@contextlib.contextmanager
def stdout_reserved() -> Iterator[None]:
    """Whatever a library prints meanwhile goes to stderr, so that stdout holds the result only."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def say(text: str) -> None:
    """A line for people, on stderr."""
    typer.echo(text, err=True)


def emit(value: Any) -> None:
    """One JSON value on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text, the first one underlined."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def number(value: Any, form: str = ".3f") -> str:
    """A number as text, a dash for what is not known."""
    return "-" if value is None else format(value, form)


def write_text(file: Path, text: str) -> None:
    """Write ``file`` whole or not at all."""
    write_whole(file, text.encode())
