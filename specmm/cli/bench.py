"""``specmm bench``: methods against plain decoding, interleaved in one process."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer

from specmm.cli.generate import Dtype, Json, Model, Seed
from specmm.cli.output import emit, number, stdout_reserved, table

COLUMNS = ("method", "s/picture", "speed-up", "tau", "host", "ideal", "log-lik", "certificate")


def bench(
    model: Model,
    methods: Annotated[
        str | None, typer.Option(help="Comma separated, options in brackets; the family's own if left out.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    n: Annotated[int, typer.Option("-n", min=1, help="Runs of every method; medians are printed.")] = 5,
    seed: Seed = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure speed, block efficiency and likelihood; plain decoding always runs along as the baseline."""
    from specmm.cli.parse import parse_methods
    from specmm.image_ar.pipeline import family_of

    family = family_of(model)
    contenders = parse_methods(family.methods, methods or family.compared)
    seed = secrets.randbelow(2**31) if seed is None else seed
    with stdout_reserved():
        rows = _measure(model, contenders, methods is None, batch, n, seed, dtype)
    if as_json:
        emit(rows)
        return
    typer.echo(table([COLUMNS, *(_cells(row) for row in rows)]))
    typer.echo(f"{n} runs each at batch {batch}, {rows[0]['dtype']}, {rows[0]['threads']} threads, seed {seed}")


def _runnable(pipe: Any, usual: list[Any]) -> list[Any]:
    """Those of the family's ``usual`` methods that this model has a drafter or a small model for."""
    from specmm.methods import SJD, CoDe

    if hasattr(pipe, "parts"):
        found = [m for m in usual if getattr(m, "drafter", None) in (None, *pipe.parts.drafters)]
        return found or [SJD()]
    return [m for m in usual if not isinstance(m, CoDe) or pipe.small is not None]


def _measure(
    model: str, contenders: list[Any], usual: bool, batch: int, n: int, seed: int, dtype: str
) -> list[dict[str, Any]]:
    import torch

    from specmm.cli.drawing import load
    from specmm.cli.race import likelihood, race, summary
    from specmm.methods import AR

    pipe = load(model, dtype)
    if getattr(pipe.transformer.config, "model_type", "c2i") != "c2i":
        raise ValueError("bench draws classes, give a class-conditional model")
    contenders = _runnable(pipe, contenders) if usual else contenders
    classes = pipe.transformer.config.num_classes
    rounds = [[(i * batch + j) % classes for j in range(batch)] for i in range(n)]
    lanes = race(pipe, [AR(), *(m for m in contenders if m != AR())], rounds, seed)
    facts = {
        "model": model,
        "seed": seed,
        "dtype": str(next(pipe.transformer.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "outputs": [],
    }
    return [
        {**summary(lane, lanes[0], batch), "quality": {"log_likelihood": likelihood(pipe, lane, rounds)}, **facts}
        for lane in lanes
    ]


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
