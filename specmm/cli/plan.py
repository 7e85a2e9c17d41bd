"""``specmm plan``: what the autotuner measures on this machine, and what it would run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specmm.cli.generate import Dtype, Json, Model
from specmm.cli.output import emit, number, stdout_reserved


def plan(
    model: Model,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    cfg: Annotated[
        float | None, typer.Option(help="Guidance scale: twice the rows a step; none is 1, of VAR 0.")
    ] = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine, and say which tree method auto takes, or how many scales the large model of code draws."""
    with stdout_reserved():
        from specmm.cli.drawing import load

        pipe = load(model, dtype)
        planned = _scales if hasattr(pipe, "plan") else _tokens if hasattr(pipe, "parts") else None
        if planned is None:
            raise ValueError(f"plan must be asked about a model of tokens or of scales, got {model}")
        found, lines = planned(pipe, model, batch, cfg)
    if as_json:
        emit(found)
    else:
        typer.echo("\n".join(lines))


def _scales(pipe: Any, model: str, batch: int, cfg: float | None) -> tuple[dict[str, Any], list[str]]:
    """CoDe by N: predicted seconds and memory, and the N that method code takes."""
    made = pipe.plan(batch, pipe.target(cfg=cfg))
    facts = {"model": model, "batch": batch, "dtype": str(pipe.transformer.dtype).removeprefix("torch.")}
    return {**facts, **made.as_dict()}, [f"{model}, {batch} at a time, {facts['dtype']}", *made.lines()]


def _tokens(pipe: Any, model: str, batch: int, cfg: float | None) -> tuple[dict[str, Any], list[str]]:
    """What method auto measures and takes."""
    found = _measure(pipe, model, batch, cfg)
    lines = [f"{found['model']}, {found['batch']} at a time, {found['dtype']}, {found['threads']} threads"]
    if found["costs"]:
        costs = found["costs"]
        lines.append(f"plain step  {1000 * costs['step']:.2f} ms, host {1000 * costs['host']:.2f} ms a round")
        lines.append("draft       " + _row(costs["draft"], "levels"))
        lines.append("verify      " + _row(costs["verify"], "nodes"))
    lines.append(f"choice      {found['choice']}: {found['reason']}")
    if found["parents"]:
        lines.append(f"tree        parents {found['parents']}, tau {number(found['tau'], '.2f')} expected")
    return found, lines


def _measure(pipe: Any, model: str, batch: int, cfg: float | None) -> dict[str, Any]:
    import torch

    from specmm.image_ar.tokens.tuning import measure_costs, planned_for

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
