"""``specmm plan``: what the autotuner measures on this machine, and what it would run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specmm.cli.generate import Dtype, Json, Model
from specmm.cli.output import emit, number, stdout_reserved


def plan(
    model: Model,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    cfg: Annotated[float | None, typer.Option(help="Guidance scale; above 1 a step has twice the rows.")] = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure draft, verify and host costs here, and say which tree method auto takes."""
    with stdout_reserved():
        found = _measure(model, batch, cfg, dtype)
    if as_json:
        emit(found)
        return
    typer.echo(f"{found['model']}, {found['batch']} at a time, {found['dtype']}, {found['threads']} threads")
    if found["costs"]:
        costs = found["costs"]
        typer.echo(f"plain step  {1000 * costs['step']:.2f} ms, host {1000 * costs['host']:.2f} ms a round")
        typer.echo("draft       " + _row(costs["draft"], "levels"))
        typer.echo("verify      " + _row(costs["verify"], "nodes"))
    typer.echo(f"choice      {found['choice']}: {found['reason']}")
    if found["parents"]:
        typer.echo(f"tree        parents {found['parents']}, tau {number(found['tau'], '.2f')} expected")


def _measure(model: str, batch: int, cfg: float | None, dtype: str) -> dict[str, Any]:
    import torch

    from specmm.cli.drawing import load
    from specmm.image_ar.tokens.tuning import measure_costs, planned_for

    pipe = load(model, dtype)
    target = pipe.target(cfg=cfg)
    made = planned_for(target, pipe.parts, batch)
    costs = None
    if "block" in pipe.parts.drafters:
        cost = measure_costs(target, pipe.parts, batch)
        costs = {"step": cost.step, "host": cost.host, "draft": cost.draft, "verify": cost.verify}
    return {
        "model": model,
        "batch": batch,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "costs": costs,
        "choice": "ar" if made.shape is None else "speculative",
        "parents": None if made.shape is None else made.shape.parents[0].tolist(),
        "tau": made.expected_tau,
        "speedup": made.expected_speedup,
        "reason": made.reason,
    }


def _row(seconds: Any, unit: str) -> str:
    return ", ".join(f"{size} {unit} {1000 * s:.2f} ms" for size, s in sorted(seconds.items()))
