"""Measure pictures of tokens: ``python -m benchmarks.run [PART]``, everything by default.

Every part writes its results as it goes and the report after it: a run that is stopped early still
reports what it has. ``draft-free`` is speed, of SJD's windows and guesses, coupled and drawn
afresh. The releases' own code, of clones that the user fetches, is measured beside ours by
``python -m benchmarks.official``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import typer

from benchmarks.acceptance import measure_acceptance
from benchmarks.quality import measure_quality
from benchmarks.report import write_report
from benchmarks.settings import Options
from benchmarks.speed import measure_speed

PARTS: dict[str, Callable[[Options], object]] = {
    "speed": measure_speed,
    "draft-free": partial(measure_speed, name="draft_free_speed"),
    "acceptance": measure_acceptance,
    "quality": measure_quality,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what ``arguments`` (default: the command line's) ask for."""
    options = read_arguments(arguments)
    try:
        for name, measure in PARTS.items():
            if options.part in (name, "all"):
                start = time.perf_counter()
                measure(options)
                print(f"{name}: {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
                write_report(options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=sys.stderr)
    print(f"report: {write_report(options.out)}")
    return 0


def read_arguments(arguments: Sequence[str] | None = None) -> Options:
    """The options of ``arguments`` (default: the command line's)."""
    command = typer.Typer(add_completion=False)
    command.command()(Options)
    try:
        found = command(arguments, standalone_mode=False)
    except typer.TyperException as error:
        raise SystemExit(f"error: {error}") from error
    return found or sys.exit()  # after --help


if __name__ == "__main__":
    sys.exit(main())
