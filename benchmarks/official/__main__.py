"""Time the releases' own code beside ours and write ``official.json`` and ``.csv``.

    python -m benchmarks.official --var FOLDER --code FOLDER --llamagen FOLDER --mar FOLDER \\
        --lantern FOLDER

Both sides compute in float32 with the same weights. Ratios are theirs over ours, the median of
pairs of calls with pixels, of five pairs or more; before anything is timed, both must draw the same
greedy pictures. Rows of earlier runs stay until they are measured again.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.common import RESULTS, Budget, Out, Row, Threads, environment, merged, write_results
from benchmarks.official.contests import SOURCES, Contest, contests
from benchmarks.official.duel import Duel

NAME = "official"
AGREE = 0.98  # of greedy tokens: rounding decides between near ties, and then what follows
GAP = 1e-4
STAMP = ("machine", "torch", "git", "date")
KEYS = ("release", "model", "method", "batch", "threads")
MODELS = ["pocket/var", "pocket/llamagen", "pocket/mar"]


def compare(duel: Duel, repeats: int, budget: Budget, memory: bool = True) -> Row:
    """Agreement, times and perhaps memory; raises ``ValueError`` for two that do not agree."""
    agreement = duel.agreement()
    if agreement.get("token_equal", 1.0) < AGREE:
        raise ValueError(
            f"{duel.method} must draw the release's greedy tokens, got "
            f"{agreement['token_equal']:.1%} of them"
        )
    if agreement.get("network_gap", 0.0) > GAP:
        raise ValueError(
            f"{duel.method} must compute what the release does within {GAP}, got "
            f"{agreement['network_gap']:.1e}"
        )
    duel.race(repeats, budget)
    return duel.row() | agreement | (duel.peaks() if memory else {})


def measured() -> Row:
    """Where and when a row is measured: rows of one file may be of several runs."""
    facts = environment()
    return {name: facts[name] for name in STAMP}


def duel_of(contest: Contest, batch: int) -> Duel:
    """A contest at a number of pictures at once."""
    programs = contest.theirs.fresh(), contest.ours.fresh()
    return Duel(contest.method, *programs, batch, contest.classes, contest.compared)


def main(
    var: Annotated[Path | None, typer.Option(help="A clone of FoundationVision/VAR.")] = None,
    code: Annotated[Path | None, typer.Option(help="A clone of czg1225/CoDe.")] = None,
    llamagen: Annotated[
        Path | None, typer.Option(help="A clone of FoundationVision/LlamaGen.")
    ] = None,
    mar: Annotated[Path | None, typer.Option(help="A clone of LTH14/mar; needs timm.")] = None,
    lantern: Annotated[Path | None, typer.Option(help="A clone of jadohu/LANTERN.")] = None,
    model: Annotated[
        list[str], typer.Option(help="A model of ours, or dN or dN,dM: VARs of random weights.")
    ] = MODELS,
    only: Annotated[
        str | None, typer.Option(help="A method, as its row calls it; all without it.")
    ] = None,
    n: Annotated[str, typer.Option(help="CoDe's N, with commas between.")] = "5",
    batches: Annotated[str, typer.Option(help="Pictures at once, with commas between.")] = "1,16",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 16,
    minutes: Annotated[
        float, typer.Option(min=0, help="For each row: no new repeat begins after so many.")
    ] = 2.0,
    memory: Annotated[
        bool, typer.Option(help="Also measure peak memory, with every operation watched: slow.")
    ] = True,
    threads: Threads = 2,
    out: Out = RESULTS,
) -> None:
    """Measure and write ``official.json`` and ``.csv``."""
    torch.set_num_threads(threads)
    given = dict(zip(SOURCES, (var, code, llamagen, mar, lantern), strict=True))
    folders = {name: folder for name, folder in given.items() if folder is not None}
    if not folders:
        raise ValueError("at least one release must be given, got none: --var FOLDER …")
    by = [int(value) for value in n.split(",")]
    rows = list[Row]()
    for name in model:
        for contest in contests(name, folders, by):
            if only not in (None, contest.method):
                continue
            most = contest.most or math.inf
            for batch in [b for b in map(int, batches.split(",")) if b <= most]:
                duel = duel_of(contest, batch)
                facts = {"release": contest.release, "model": name, "threads": threads}
                rows.append(facts | compare(duel, repeats, Budget(minutes), memory) | measured())
                whole = merged(out, NAME, rows, KEYS)
                write_results(out, NAME, whole, environment(dtype="torch.float32"))


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
