"""``specmm methods``: what there is to choose from, and what each claims."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import typer

from specmm import methods
from specmm.cli.options import Json
from specmm.cli.output import emit
from specmm.registry import Registry

FAMILIES: dict[str, Registry] = {
    "image tokens": methods.IMAGE_TOKENS,
    "scales": methods.SCALES,
    "continuous tokens": methods.CONTINUOUS,
    "questions about pictures": methods.VQA,
    "text": methods.TEXT,
}


def methods_command(as_json: Json = False) -> None:
    """List methods by family, and the drafters, trees and rules that method draft puts together."""
    from specmm.image_ar.tokens.assemble import DRAFTERS
    from specmm.shape.trees import NAMED, TREES
    from specmm.verify.rule import RULES, is_exact

    found: dict[str, Any] = {
        "methods": {family: _described(kinds) for family, kinds in FAMILIES.items()},
        "drafters of image tokens": list(DRAFTERS),
        "drafters of answers and texts": [
            name for name in methods.GENERATE if {"tree", "rule"} <= _options(name)
        ],
        "trees": {kind.spelling: kind.what for kind in TREES.values()}
        | {"sequoia(12)": "the best of so many nodes for the drafter's measured acceptance"}
        | {name: f"a published list of {len(paths)} drafts" for name, paths in NAMED.items()},
        "rules": {
            name: f"{'exact' if is_exact(name) else 'relaxed, measured'}: {kind.what}"
            for name, kind in RULES.items()
        },
    }
    if as_json:
        emit(found)
        return
    for family, kinds in found.pop("methods").items():
        typer.echo(family)
        for name, (claim, what) in kinds.items():
            typer.echo(f"  {name:14} {claim:14} {what}")
    typer.echo("method draft: any drafter, tree and rule, as")
    typer.echo("  draft(drafter=block, tree=delayed(1, 3, 2), rule=k-seq)")
    for kind, entries in found.items():
        typer.echo(kind)
        for entry in entries:
            typer.echo(
                f"  {entry:40} {entries[entry]}" if isinstance(entries, dict) else f"  {entry}"
            )


def _described(kinds: Registry) -> dict[str, tuple[str, str]]:
    """By name what a method claims, and the first line of its documentation."""
    found = {}
    for name in kinds:
        method = kinds.get(name)
        line = (method.__doc__ or "").splitlines()[0].replace("``", "")
        found[name] = (method.claims, re.sub(r":class:`(\w+)`", r"\1", line))
    return found


def _options(name: str) -> set[str]:
    """The options of a method, none for one that takes any drafter."""
    options = {f.name for f in dataclasses.fields(methods.GENERATE.get(name))}
    return set() if "drafter" in options else options
