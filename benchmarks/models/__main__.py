"""The table of model types: which of transformers' are served, refused, or not built here.

    python -m benchmarks.models
    python -m benchmarks.models --only qwen3_5

Each type is a tiny random model in float32. Its greedy answers to text, one picture, two, and a
ragged batch must be those of its own ``generate``, with plain decoding, prompt lookup and a tree
of a small model's drafts.
"""

from __future__ import annotations

import warnings
from typing import Annotated

import typer
from tqdm import tqdm

from benchmarks.models import check
from benchmarks.models.table import ask_apart, types


def main(
    only: Annotated[list[str] | None, typer.Option(help="Types; nothing is written.")] = None,
    mapping: Annotated[str, typer.Option(help="image-text-to-text or causal.")] = "",
) -> None:
    """Ask every type."""
    warnings.simplefilter("ignore")
    check.quiet()
    chosen = [
        line
        for line in types()
        if (not only or line.type in only) and mapping in ("", line.mapping)
    ]
    for line in tqdm(chosen, desc="types"):
        found = ask_apart(line)
        tqdm.write(f"{found.mapping} {found.type}: {found.status} {found.equal}/{found.settings} "
                   f"{found.seconds}s {found.reason}")
        if only:
            for outcome in found.outcomes:
                tqdm.write(f"  {' '.join(outcome)}")


if __name__ == "__main__":
    typer.run(main)
