"""``specmm methods`` and ``specmm zoo``: list the available methods and models."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from specmm import methods
from specmm.cli.options import Json
from specmm.cli.output import emit, table
from specmm.cli.published import list_published
from specmm.extending.registry import Registry, maker_of, summary, unknown

HEAD = ("model", "size", "licence", "what it is")
SHORT = (24, 60)  # letters of a licence and of a description in the table of models
WIDTH = 96  # letters of a line of classes
HINT = "specmm zoo NAME prints a model's card: data, what was measured, classes"


def methods_command(as_json: Json = False) -> None:
    """List methods by family, and the drafters, trees and rules that method draft puts together."""
    from specmm.extending.outside import OTHERS
    from specmm.image_ar.tokens.assemble import DRAFTERS
    from specmm.shape.trees import NAMED, TREES
    from specmm.verify.rule import RULES

    families = {family: _descriptions(kinds) for family, kinds in methods.Methods.families.items()}
    names: dict[str, list[str]] = {
        "drafters of image tokens": [*DRAFTERS, *OTHERS],
        "drafters of answers and texts": [*filter(_drafts, methods.GENERATE), *OTHERS],
    }
    described: dict[str, dict[str, str]] = {
        "trees": {kind.spelling: kind.what for kind in TREES.values()}
        | {"sequoia(12)": "the best of so many nodes for the drafter's measured acceptance"}
        | {name: f"a published list of {len(paths)} drafts" for name, paths in NAMED.items()},
        "rules": {
            name: f"{'exact' if kind.rule.exact else 'relaxed, measured'}{_author(kind.rule)}: "
            + kind.what
            for name, kind in RULES.items()
        },
    }
    if as_json:
        return emit({"methods": families, **names, **described})
    for family, kinds in families.items():
        typer.echo(family)
        for name, (claim, line) in kinds.items():
            typer.echo(f"  {name:14} {claim:14} {line}")
    typer.echo("method draft: any drafter, tree and rule, as")
    typer.echo("  draft(drafter=block, tree=delayed(1, 3, 2), rule=specinfer)")
    for title, entries in names.items():
        typer.echo("\n  ".join([title, *entries]))
    for title, lines in described.items():
        typer.echo("\n".join([title, *(f"  {name:40} {line}" for name, line in lines.items())]))


def _author(rule: object) -> str:
    """A note that names the author of a third-party rule's claim; "" for our own rules."""
    maker = maker_of(rule)
    return f" by the word of {maker}" if maker else ""


def _descriptions(kinds: Registry) -> dict[str, tuple[str, str]]:
    """For each method by name, its claim and its summary."""
    described = {}
    for name in kinds:
        method = kinds.get(name)
        line = summary(method).replace("``", "`")
        if method.here:
            line += f" (Here {method.here}.)"
        described[name] = (method.claims, re.sub(r":class:`(\w+)`", r"\1", line))
    return described


def _drafts(name: str) -> bool:
    """Whether method draft can use the drafter of method ``name``, which has a tree and a rule."""
    options = {f.name for f in dataclasses.fields(methods.GENERATE.get(name))}
    return {"tree", "rule"} <= options and "drafter" not in options


def zoo(
    name: Annotated[
        str | None, typer.Argument(help="A shipped model: its whole card, with its classes.")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Published models that run by name, instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the shipped models, or print the card of one: data, licence, what was measured."""
    if published and name is not None:
        raise ValueError(f"give {name} or --published, not both")
    if published:
        return list_published(as_json)
    from specmm.zoo import pocket_models

    shipped = pocket_models()
    if name is not None and name not in shipped:
        raise unknown("pocket model", name, shipped)
    cards = [_card(model) for model in ([name] if name else shipped)]
    if as_json:
        return emit(cards[0] if name else cards)
    if not cards:
        return typer.echo("no pocket models in this installation")
    if name is None:
        return typer.echo(table([HEAD, *map(_table_row, cards)]) + "\n" + HINT)
    typer.echo(_model_lines(cards[0]))
    if named := cards[0]["classes"]:
        lines = textwrap.wrap(", ".join(named), WIDTH, break_on_hyphens=False)
        typer.echo("\n  ".join([f"  classes, by id from 0 to {len(named) - 1}:", *lines]))


def _card(name: str) -> dict[str, Any]:
    from specmm.zoo import card, classes, pocket_models

    folder = pocket_models()[name]
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return {"name": name, "bytes": size, **card(name), "classes": classes(folder)}


def _table_row(model: Mapping[str, Any]) -> list[str]:
    """A row of the table of models."""
    texts = [str(model.get(key, "")) for key in ("licence", "description")]
    cut = [textwrap.shorten(t, w, placeholder=" …") for t, w in zip(texts, SHORT, strict=True)]
    return [model["name"], f"{model['bytes'] / 2**20:.1f} MB", *cut]


def _model_lines(model: Mapping[str, Any]) -> str:
    """A shipped model's card as text."""
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
    """A JSON value as text for users."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
