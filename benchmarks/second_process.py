"""Seconds of a process's first compiled picture, where an earlier process has kept its programs.

    python -m benchmarks.second_process --before ../another-checkout

A process opens ``pocket/llamagen`` and draws one picture several times. ``first`` is the first call
after opening, of which ``beyond`` is what it takes more than the quickest later one; ``process``
is all of it with imports and opening. ``before them`` is the first call of one more process, which
builds the programs unless they are in the folder ``--programs``. The runs are in turn with those
of ``--before``, the code of an earlier commit, whose programs have a folder of their own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks.common import RESULTS, Out, Row, environment, read_results, write_results

ROOT = Path(__file__).parents[1]
METHODS = "ar,speculative,lantern++,sjd"
SCRIPT = """
import json, sys, time
begin = time.perf_counter()
import torch
from specmm import ImagePipeline
pipe = ImagePipeline.from_pretrained("pocket/llamagen")
opened = time.perf_counter()
def draw():
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    out = pipe(3, method=sys.argv[1], compiled=True, generator=generator)
    return time.perf_counter() - start, out.tokens.tolist()
first, tokens = draw()
process = time.perf_counter() - begin
rest = [draw() for _ in range(3)]
assert all(again == tokens for _, again in rest)
later = min(seconds for seconds, _ in rest)
print(json.dumps({"first": first, "later": later, "process": process, "tokens": tokens}))
"""


def process(method: str, code: Path, programs: Path, threads: int) -> dict[str, float]:
    """What a new process of the checkout ``code`` measures, its programs in ``programs``."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")}
    own |= {"PYTHONPATH": str(code), "SPECMM_PROGRAMS": str(programs)}
    own["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, method]
    run = subprocess.run(command, env=own, cwd=code, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def rows_of(
    method: str, codes: dict[str, Path], programs: Path, threads: int, runs: int
) -> list[Row]:
    """A row for each of ``codes``; raises ``ValueError`` where their tokens differ."""
    folders = {name: programs / name for name in codes}
    built = {name: process(method, code, folders[name], threads) for name, code in codes.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in codes}
    for _ in range(runs):
        for name, code in codes.items():
            found[name].append(process(method, code, folders[name], threads))
    drawn = {str(one["tokens"]) for one in chain(built.values(), *found.values())}
    if len(drawn) > 1:
        raise ValueError(f"all processes must draw the same tokens, {method} drew {len(drawn)}")
    return [
        {
            "method": method,
            "code": name,
            "threads": threads,
            "before them": round(built[name]["first"], 2),
            **{key: _median(each, key) for key in ("first", "later", "process")},
            "beyond": round(_median(each, "first") - _median(each, "later"), 2),
            "firsts": [round(one["first"], 2) for one in each],
        }
        for name, each in found.items()
    ]


def _median(found: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(one[key] for one in found), 2)


def main(
    methods: Annotated[str, typer.Option(help="With commas.")] = METHODS,
    before: Annotated[Path | None, typer.Option(help="A checkout to compare with.")] = None,
    threads: int = 1,
    runs: Annotated[int, typer.Option(help="Later processes of each.")] = 5,
    programs: Annotated[Path | None, typer.Option(help="Keep programs here.")] = None,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``second_process.csv`` and ``second_process.json``, which keep what is not
    measured.
    """
    codes = {"this": ROOT} | ({} if before is None else {"before": before.resolve()})
    for method in methods.split(","):
        known = (read_results(out, "second_process") or {"rows": []})["rows"]
        kept = [row for row in known if (row["method"], row["threads"]) != (method, threads)]
        with TemporaryDirectory(prefix="specmm-") as new:
            rows = kept + rows_of(method, codes, programs or Path(new), threads, runs)
        write_results(out, "second_process", rows, environment(threads=threads))


if __name__ == "__main__":
    typer.run(main)
