"""What the planners measure on this machine, as a record for JSON and as lines for people."""

from __future__ import annotations

from typing import Any

import torch

from specmm.dtypes import LARGE, choose_dtype
from specmm.runs.run import Place, open_model

Planned = tuple[dict[str, Any], list[str]]


def plan_model(model: str, batch: int, cfg: float | None, place: Place) -> Planned:
    """What is planned for ``model``, ``batch`` pictures at a time.

    Raises ``ValueError`` for a model of continuous tokens, for which there is nothing to plan.
    """
    pipe = open_model("images", model, place)
    if pipe.plans is None:
        raise ValueError(f"plan must be asked about a model of tokens or of scales, got {model}")
    made = _trees if pipe.plans == "trees" else _scales
    return made(pipe, model, batch, pipe.target(cfg=cfg))


def plan_published(
    large: int, small: int, resolution: int, batch: int, cfg: float | None, place: Place
) -> Planned:
    """CoDe by N for VARs of two published depths, without weights and without the tokenizer."""
    from specmm.image_ar.scales.sampling import Sampling
    from specmm.image_ar.scales.tuning import plan_of_sizes
    from specmm.image_ar.scales.var import check_published, published

    check_published(large, small, resolution)
    if str(place.device) != "cpu":
        raise ValueError(
            f"published sizes are measured on the CPU, got {place.device}; leave --device out"
        )
    dtype = place.dtype or choose_dtype(LARGE, long=True)
    sampling = Sampling(1.5 if cfg is None else cfg, 900, 0.95)
    pair = published(large, resolution), published(small, resolution)
    title = f"VAR-d{large} and VAR-d{small} at {resolution} px, tokens only"
    return _by_n(title, batch, dtype, plan_of_sizes(*pair, batch, sampling, dtype))


def _scales(pipe: Any, model: str, batch: int, target: Any) -> Planned:
    """CoDe by N: predicted seconds and memory, and the N that method code takes."""
    return _by_n(model, batch, pipe.transformer.dtype, pipe.plan(batch, target))


def _by_n(model: str, batch: int, dtype: torch.dtype, made: Any) -> Planned:
    facts = {"model": model, "batch": batch, "dtype": str(dtype).removeprefix("torch.")}
    head = f"{model}, {batch} at a time, {facts['dtype']}; memory without the tokenizer's"
    return {**facts, **made.as_dict()}, [head, *made.lines()]


def _trees(pipe: Any, model: str, batch: int, target: Any) -> Planned:
    """What method auto measures and takes, and the very seconds that it decided on."""
    from specmm.image_ar.tokens.assemble import choose_method, planned_for

    made = planned_for(target, pipe.parts, batch)
    found = {
        "model": model,
        "batch": batch,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "costs": None,
        "choice": choose_method(target, pipe.parts, batch).name,
        "parents": None if made.shape is None else made.shape.parents[0].tolist(),
        "tau": made.expected_tau,
        "speedup": made.expected_speedup,
        "reason": made.reason,
    }
    lines = [f"{model}, {batch} at a time, {found['dtype']}, {found['threads']} threads"]
    if made.costs is not None:
        cost = made.costs
        found["costs"] = {
            "step": cost.step,
            "host": cost.host,
            "draft": cost.draft,
            "verify": cost.verify,
        }
        lines += [
            f"plain step  {1000 * cost.step:.2f} ms, host {1000 * cost.host:.2f} ms a round",
            f"draft       {_row(cost.draft, 'levels')}",
            f"verify      {_row(cost.verify, 'nodes')}",
        ]
    lines.append(f"choice      {found['choice']}: {made.reason}")
    if made.shape is not None:
        lines.append(
            f"tree        parents {found['parents']}, tau {made.expected_tau:.2f} expected"
        )
    return found, lines


def _row(seconds: Any, unit: str) -> str:
    return ", ".join(f"{size} {unit} {1000 * s:.2f} ms" for size, s in sorted(seconds.items()))
