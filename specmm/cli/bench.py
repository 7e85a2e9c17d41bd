"""``specmm bench``: methods against plain decoding, interleaved in one process."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer

from specmm.cli.options import Device, Dtype, Json, Model, Seed
from specmm.cli.output import emit, number, stdout_reserved, table

COLUMNS = ("method", "s/picture", "speed-up", "tau", "host", "ideal", "log-lik", "certificate")


def bench(
    model: Model,
    methods: Annotated[
        str | None,
        typer.Option(help="Comma separated, options in brackets; the family's own if left out."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    n: Annotated[
        int, typer.Option("-n", min=1, help="Runs of every method; medians are printed.")
    ] = 5,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure speed, block efficiency and likelihood; plain decoding always runs along as the
    baseline.
    """
    from specmm.image_ar.pipeline import family_of
    from specmm.runs.method_names import parse_methods
    from specmm.runs.models import Place, open_model
    from specmm.runs.race import measure, runnable

    family = family_of(model)
    contenders = parse_methods(family.methods, methods or family.compared)
    seed = secrets.randbelow(2**31) if seed is None else seed
    with stdout_reserved():
        pipe = open_model("images", model, Place.named(device, dtype))
        contenders = runnable(pipe, contenders) if methods is None else contenders
        rows = measure(pipe, model, contenders, batch, n, seed)
    if as_json:
        emit(rows)
        return
    typer.echo(table([COLUMNS, *(_cells(row) for row in rows)]))
    typer.echo(
        f"{n} runs each at batch {batch}, {rows[0]['dtype']}, {rows[0]['threads']} threads, seed {seed}"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    tv = row["certificate"]["tv"]
    likelihood = row["quality"]["log_likelihood"]
    kind = row["certificate"]["kind"] + (f", tv {tv:.4f}" if tv else "")
    return [
        row["label"],
        number(row["seconds_per_picture"]),
        f"{row['speedup']:.2f}x",
        number(row["tau"], ".2f"),
        f"{row['host_overhead']:.0%}",
        f"{row['ideal']:.2f}x",
        number(likelihood) if likelihood is not None else "-",
        kind,
    ]
