"""The table of model types: which of transformers' are served, refused, or not built here.

    python -m benchmarks.models
    python -m benchmarks.models --only qwen3_5

Each type is a tiny random model in float32. Its greedy answers to text, one picture, two, and a
ragged batch must be those of its own ``generate``, with plain decoding, prompt lookup and a tree
of a small model's drafts.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import transformers
import typer
from tqdm import tqdm

from benchmarks.common import RESULTS, Out, Row, environment, write_results
from benchmarks.models.page import page
from benchmarks.models.table import Line, ask_apart, types


def main(
    only: Annotated[list[str] | None, typer.Option(help="Types; nothing is written.")] = None,
    mapping: Annotated[str, typer.Option(help="Types of one mapping; nothing is written.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Types asked at once.")] = 2,
    out: Out = RESULTS,
    docs: Annotated[Path, typer.Option(help="The page.")] = Path("docs/models.md"),
) -> None:
    """Ask every type, and write ``models.json``, ``models.csv`` and the page."""
    chosen = [
        line
        for line in types()
        if (not only or line.type in only) and mapping in ("", line.mapping)
    ]
    if not chosen:
        raise typer.BadParameter(f"no type of transformers is called {' or '.join(only or ())}")
    found = []
    with ThreadPoolExecutor(workers) as pool:
        for line in tqdm(pool.map(ask_apart, chosen), total=len(chosen), desc="types"):
            found.append(line)
            show(line, bool(only))
    if only or mapping:
        return
    facts = environment(transformers=transformers.__version__)
    rows = [row(line) for line in found]
    write_results(out, "models", rows, facts)
    docs.parent.mkdir(parents=True, exist_ok=True)
    docs.write_text(page(rows, facts))


def show(line: Line, settings: bool) -> None:
    """Print what came of a type, and of each of its ``settings``."""
    text = f"{line.mapping} {line.type}: {line.status} {line.equal}/{line.settings}"
    tqdm.write(f"{text} {line.seconds}s {line.reason}")
    for outcome in line.outcomes if settings else ():
        tqdm.write(f"  {' '.join(outcome)}")


def row(line: Line) -> Row:
    """What is written of ``line``: without the seconds, which differ from run to run."""
    left_out = ("outcomes", "seconds")
    return {k: v for k, v in dataclasses.asdict(line).items() if k not in left_out}


if __name__ == "__main__":
    typer.run(main)
