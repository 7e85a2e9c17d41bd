"""``specmm plan``: what the autotuner measures on this machine, and what it would run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specmm.cli.options import Device, Dtype, Json
from specmm.cli.output import emit, number, stdout_reserved

if TYPE_CHECKING:
    from specmm.runs.models import Place

PAIR = re.compile(r"d(\d+),d(\d+)")  # depths of a large and a small VAR of published sizes


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a pocket model (see specmm zoo) or a hub id; or two published sizes of VAR, as d30,d16: no "
            "weights are needed."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    cfg: Annotated[
        float | None,
        typer.Option(help="Guidance scale: twice the rows a step; none is 1, of VAR 0."),
    ] = None,
    resolution: Annotated[
        int, typer.Option(help="Pixels a side of published sizes: 256 or 512.")
    ] = 256,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure this machine, and say which tree method auto takes, or how many scales the large
    model of code draws.
    """
    from specmm.runs.models import Place

    with stdout_reserved():
        place = Place.named(device, dtype)
        if pair := PAIR.fullmatch(model):
            large, small = map(int, pair.groups())
            found, lines = _sizes(large, small, resolution, batch, cfg, place)
        else:
            found, lines = _loaded(model, batch, cfg, place)
    if as_json:
        emit(found)
    else:
        typer.echo("\n".join(lines))


def _sizes(
    large: int, small: int, resolution: int, batch: int, cfg: float | None, place: Place
) -> tuple[dict[str, Any], list[str]]:
    """CoDe by N for two published sizes: tokens only, for the tokenizer's decoder is not among the
    sizes.
    """
    from specmm.hardware import LARGE, choose_dtype
    from specmm.image_ar.scales.sampling import Sampling
    from specmm.image_ar.scales.sizes import check_published, foresee, published

    check_published(large, small, resolution)
    if str(place.device) != "cpu":
        raise ValueError(
            f"published sizes are measured on the CPU, got device {place.device}; leave --device out"
        )
    held = place.dtype or choose_dtype(LARGE, long=True)
    sampling = Sampling(1.5 if cfg is None else cfg, 900, 0.95)
    made = foresee(
        published(large, resolution), published(small, resolution), batch, sampling, held
    )
    facts = {
        "model": f"VAR-d{large} and VAR-d{small} at {resolution} px, tokens only",
        "batch": batch,
    }
    return _by_n(facts | {"dtype": str(held).removeprefix("torch.")}, made)


def _loaded(
    model: str, batch: int, cfg: float | None, place: Place
) -> tuple[dict[str, Any], list[str]]:
    """What is planned for a model that is here."""
    from specmm.runs.models import open_model

    pipe = open_model("images", model, place)
    planned = _scales if hasattr(pipe, "plan") else _tokens if hasattr(pipe, "parts") else None
    if planned is None:
        raise ValueError(f"plan must be asked about a model of tokens or of scales, got {model}")
    return planned(pipe, model, batch, cfg)


def _scales(
    pipe: Any, model: str, batch: int, cfg: float | None
) -> tuple[dict[str, Any], list[str]]:
    """CoDe by N: predicted seconds and memory, and the N that method code takes."""
    facts = {
        "model": model,
        "batch": batch,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
    }
    return _by_n(facts, pipe.plan(batch, pipe.target(cfg=cfg)))


def _by_n(facts: dict[str, Any], made: Any) -> tuple[dict[str, Any], list[str]]:
    head = f"{facts['model']}, {facts['batch']} at a time, {facts['dtype']}; memory without the tokenizer's"
    return {**facts, **made.as_dict()}, [head, *made.lines()]


def _tokens(
    pipe: Any, model: str, batch: int, cfg: float | None
) -> tuple[dict[str, Any], list[str]]:
    """What method auto measures and takes."""
    found = _measure(pipe, model, batch, cfg)
    lines = [
        f"{found['model']}, {found['batch']} at a time, {found['dtype']}, {found['threads']} threads"
    ]
    if found["costs"]:
        costs = found["costs"]
        lines.append(
            f"plain step  {1000 * costs['step']:.2f} ms, host {1000 * costs['host']:.2f} ms a round"
        )
        lines.append("draft       " + _row(costs["draft"], "levels"))
        lines.append("verify      " + _row(costs["verify"], "nodes"))
    lines.append(f"choice      {found['choice']}: {found['reason']}")
    if found["parents"]:
        lines.append(
            f"tree        parents {found['parents']}, tau {number(found['tau'], '.2f')} expected"
        )
    return found, lines


def _measure(pipe: Any, model: str, batch: int, cfg: float | None) -> dict[str, Any]:
    import torch

    from specmm.image_ar.tokens.tuning import choose_method, planned_for

    target = pipe.target(cfg=cfg)
    made, costs = planned_for(target, pipe.parts, batch), None
    if made.costs is not None:  # the very seconds that it was decided on
        cost = made.costs
        costs = {"step": cost.step, "host": cost.host, "draft": cost.draft, "verify": cost.verify}
    return {
        "model": model,
        "batch": batch,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "costs": costs,
        "choice": choose_method(target, pipe.parts, batch).name,
        "parents": None if made.shape is None else made.shape.parents[0].tolist(),
        "tau": made.expected_tau,
        "speedup": made.expected_speedup,
        "reason": made.reason,
    }


def _row(seconds: Any, unit: str) -> str:
    return ", ".join(f"{size} {unit} {1000 * s:.2f} ms" for size, s in sorted(seconds.items()))
