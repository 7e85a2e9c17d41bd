"""Runs parts: each case once for a GPU and a commit, results written after every case.

So a part that was stopped goes on where it was, and one that is finished is not run again. In
``every`` each part is a process of its own: it has the GPU's memory for itself, and one that hangs
is stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, cpu_model, environment, git_sha, read_results, write_results
from benchmarks.gpu.parts import MOST_MINUTES, Bench, Case, Part


@dataclass
class Progress:
    """The rows of a part so far, the errors of its cases by name, those left for want of time,
    and the one that runs (``at``): in a file it is the one at which the part was stopped.
    """

    rows: list[Row] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    at: str = ""
    finished: bool = False

    @classmethod
    def found(cls, bench: Bench, part: Part) -> Progress:
        """What an earlier run on the same GPU and commit has left."""
        try:
            there = read_results(bench.out, part.name)
        except json.JSONDecodeError:  # it was stopped while it wrote
            there = None
        wanted = key(bench)
        if there is None or not (bench.tiny or _known(wanted["git"])):
            return cls()
        facts = there["environment"]
        if any(facts.get(name) != value for name, value in wanted.items()):
            return cls()
        return cls(there["rows"], at=facts["at"], finished=facts["finished"])

    @property
    def cases(self) -> set[str]:
        """The names of those measured."""
        return {row["case"] for row in self.rows}


def key(bench: Bench) -> dict[str, Any]:
    """What results belong to."""
    return {
        "gpu": torch.cuda.get_device_name() if bench.on_gpu else None,
        "machine": cpu_model(),
        "torch": torch.__version__,
        "git": git_sha(),
        "tiny": bench.tiny,
    }


def _known(git: str) -> bool:
    """Whether a commit says what was measured: there is one, and nothing was changed since."""
    return git != "unknown" and not git.endswith("+")


def run(part: Part, bench: Bench, again: bool = False) -> bool:
    """Measure what is missing of ``part`` (``again``: everything); whether all of it is there."""
    done = Progress() if again else Progress.found(bench, part)
    if done.finished:
        print(f"{part.name}: is there, for this machine and commit (--again measures it again)")
        return True
    facts = environment(**key(bench), device=bench.device.type, dtype=str(bench.dtype))
    try:
        _measure(part, bench, done, facts)
    except Exception as error:  # the parts that follow go on
        done.errors[""] = _told(error)
    done.finished = not done.errors and not done.left
    _write(part, bench, done, facts)
    for name, error in done.errors.items():
        print(f"{part.name}: {name or 'the part'} failed: {error}", file=sys.stderr)
    if done.left:
        print(f"{part.name}: out of time, left for another run: {', '.join(done.left)}")
    return done.finished


def _measure(part: Part, bench: Bench, done: Progress, facts: dict[str, Any]) -> None:
    for case in _last(part.cases(bench), done.at):
        if case.name in done.cases:
            continue
        if bench.budget.spent:
            done.left.append(case.name)
            continue
        done.at = case.name
        _write(part, bench, done, facts)
        try:
            done.rows += [{"case": case.name, **row} for row in case.measure()]
        except Exception as error:
            done.errors[case.name] = _told(error)
        print(f"{part.name}: {case.name}", flush=True)
        done.at = ""
        _write(part, bench, done, facts)


def _last(cases: Iterable[Case], name: str) -> Iterator[Case]:
    """``cases`` as they come, the one called ``name`` last: it may stop the part again."""
    kept = []
    for case in cases:
        if case.name == name:
            kept.append(case)
        else:
            yield case
    yield from kept


def _told(error: Exception) -> str:
    traceback.print_exception(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _write(part: Part, bench: Bench, done: Progress, facts: dict[str, Any]) -> None:
    names = ("finished", "errors", "left", "at")
    state = {"part": part.name, **{name: getattr(done, name) for name in names}}
    # a pocket model has its device's fastest dtype, which its rows say
    dtypes = {str(row.get("dtype", bench.dtype)).removeprefix("torch.") for row in done.rows}
    if dtypes:
        state["dtype"] = ", ".join(sorted(dtypes))
    write_results(bench.out, part.name, done.rows, facts | state)


def every(parts: Iterable[Part], options: Sequence[str], minutes: float = MOST_MINUTES) -> bool:
    """Run ``parts`` in processes of their own with the command line's ``options``; whether all went
    well.
    """
    failed = []
    for part in parts:
        command = [sys.executable, "-m", "benchmarks.gpu", part.name, *options]
        try:
            code = subprocess.run(command, cwd=root(), timeout=60 * minutes).returncode
        except subprocess.TimeoutExpired:
            print(f"{part.name}: stopped after {minutes:g} minutes", file=sys.stderr)
            code = 1
        if code:
            failed.append(part.name)
    if failed:
        print(f"not finished: {', '.join(failed)}; run it again to go on", file=sys.stderr)
    return not failed


def root() -> Path:
    """The repository."""
    return Path(__file__).parents[2]
