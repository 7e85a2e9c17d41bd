"""The arguments and options that the commands of ``specmm eval`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PICTURES = "a folder, glob, .zip, .tar or .npz of pictures, or an .npz of features"
Source = Annotated[str, typer.Argument(help=f"What is measured: {PICTURES}.")]
Reference = Annotated[str, typer.Argument(help=f"What it is measured against: {PICTURES}.")]
Statistics = Annotated[
    str,
    typer.Argument(
        help=f"What it is measured against: {PICTURES} or statistics (ours, ADM's, clean-fid's, …)."
    ),
]
Network = Annotated[
    str,
    typer.Option("--features", help="Network that sees the pictures (see: specmm eval weights)."),
]
Weights = Annotated[
    Path | None, typer.Option(help="Its weights, where they are not found by themselves.")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out pictures that cannot be read, and say which.")
]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that read pictures (default: one a core).")
]
Batch = Annotated[int, typer.Option(min=1, help="Pictures at a time.")]
Device = Annotated[str, typer.Option(help="Where the network runs, such as cpu or cuda.")]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Of the method, for the report (default: SOURCE's own)."),
]
Seed = Annotated[int, typer.Option(help="Of resamples and subsets.")]
WithInterval = Annotated[
    bool, typer.Option("--interval", help="With a confidence interval: takes longer.")
]
