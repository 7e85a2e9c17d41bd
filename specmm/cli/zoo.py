"""``specmm zoo``: the models that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from specmm.cli.options import Json
from specmm.cli.output import emit


def zoo(as_json: Json = False) -> None:
    """List the shipped models: size, data, licence, what was measured."""
    from specmm.zoo import card, pocket_models

    found = [
        {"name": name, "bytes": _size(folder), **card(name)}
        for name, folder in pocket_models().items()
    ]
    if as_json:
        emit(found)
    elif not found:
        typer.echo("no pocket models in this installation")
    for model in found if not as_json else []:
        typer.echo(_lines(model))


def recorded(card: dict[str, Any], method: str) -> dict[str, Any]:
    """The card's measured row of a ``method`` by name (``metrics.quality``: rows as in
    benchmarks/results), or {}.
    """
    metrics = card.get("metrics", {})
    rows = metrics.get("quality", []) if isinstance(metrics, dict) else []
    return next(
        (dict(row) for row in rows if str(row.get("method", "")).split("(")[0] == method), {}
    )


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _lines(model: dict[str, Any]) -> str:
    lines = [
        f"{model['name']}  {model['bytes'] / 2**20:.1f} MB  {model.get('description', '')}".rstrip()
    ]
    for key in ("data", "licence", "seed", "steps", "loss", "command", "install"):
        if key in model:
            lines.append(f"  {key:9}{_text(model[key])}")
    metrics = model.get("metrics", {})
    for key, value in metrics.items() if isinstance(metrics, dict) else []:
        for row in value if isinstance(value, list) else [value]:
            lines.append(f"  {key:9}{_text(row)}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
