"""``specmm methods`` and ``specmm zoo``: the methods and the models there are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from specmm import methods
from specmm.cli.options import Json
from specmm.cli.output import emit
from specmm.cli.published import list_published
from specmm.registry import Registry

FAMILIES: dict[str, Registry] = {
    "image tokens": methods.IMAGE_TOKENS,
    "scales": methods.SCALES,
    "continuous tokens": methods.CONTINUOUS,
    "picture tokens of transformers": methods.TRANSFORMERS_IMAGES,
    "questions about pictures": methods.VQA,
    "text": methods.TEXT,
}


def methods_command(as_json: Json = False) -> None:
    """List methods by family, and the drafters, trees and rules that method draft puts together."""
    from specmm.image_ar.tokens.assemble import DRAFTERS
    from specmm.shape.trees import NAMED, TREES
    from specmm.verify.rule import RULES, is_exact

    families = {family: _described(kinds) for family, kinds in FAMILIES.items()}
    names: dict[str, list[str]] = {
        "drafters of image tokens": list(DRAFTERS),
        "drafters of answers and texts": [name for name in methods.GENERATE if _drafts(name)],
    }
    described: dict[str, dict[str, str]] = {
        "trees": {kind.spelling: kind.what for kind in TREES.values()}
        | {"sequoia(12)": "the best of so many nodes for the drafter's measured acceptance"}
        | {name: f"a published list of {len(paths)} drafts" for name, paths in NAMED.items()},
        "rules": {
            name: f"{'exact' if is_exact(name) else 'relaxed, measured'}: {kind.what}"
            for name, kind in RULES.items()
        },
    }
    if as_json:
        return emit({"methods": families, **names, **described})
    for family, kinds in families.items():
        typer.echo(family)
        for name, (claim, what) in kinds.items():
            typer.echo(f"  {name:14} {claim:14} {what}")
    typer.echo("method draft: any drafter, tree and rule, as")
    typer.echo("  draft(drafter=block, tree=delayed(1, 3, 2), rule=k-seq)")
    for title, entries in names.items():
        typer.echo("\n  ".join([title, *entries]))
    for title, lines in described.items():
        typer.echo("\n".join([title, *(f"  {name:40} {what}" for name, what in lines.items())]))


def _described(kinds: Registry) -> dict[str, tuple[str, str]]:
    """By name what a method claims, and the first line of its documentation."""
    found = {}
    for name in kinds:
        method = kinds.get(name)
        line = (method.__doc__ or "").splitlines()[0].replace("``", "`")
        found[name] = (method.claims, re.sub(r":class:`(\w+)`", r"\1", line))
    return found


def _drafts(name: str) -> bool:
    """Whether method draft can take the drafter of method ``name``: it has a tree and a rule."""
    options = {f.name for f in dataclasses.fields(methods.GENERATE.get(name))}
    return {"tree", "rule"} <= options and "drafter" not in options


def zoo(
    published: Annotated[
        bool, typer.Option("--published", help="Published models that run by name, instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the shipped models: size, data, licence, what was measured."""
    if published:
        return list_published(as_json)
    from specmm.zoo import card, pocket_models

    found = []
    for name, folder in pocket_models().items():
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        found.append({"name": name, "bytes": size, **card(name)})
    if as_json:
        return emit(found)
    for model in found:
        typer.echo(_model_lines(model))
    if not found:
        typer.echo("no pocket models in this installation")


def _model_lines(model: Mapping[str, Any]) -> str:
    title = f"{model['name']}  {model['bytes'] / 2**20:.1f} MB  {model.get('description', '')}"
    lines = [title.rstrip()]
    for key in ("data", "licence", "seed", "steps", "loss", "command", "install"):
        if key in model:
            lines.append(f"  {key:9}{_text(model[key])}")
    for key, value in model.get("metrics", {}).items():
        for row in value if isinstance(value, list) else [value]:
            lines.append(f"  {key:9}{_text(row)}")
    return "\n".join(lines)


def _text(value: object) -> str:
    """A value of JSON for people."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
