"""``specmm train RECIPE``: a training from its config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specmm.cli.options import Json, Threads
from specmm.cli.output import emit, say, stdout_reserved, table

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [MODEL]",
        help="A recipe's name or config file, and the folder of the model that gets a drafter, "
        "where one does. Without them: the names of all recipes.",
        show_default=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of it; more of them may follow."),
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="FILE", help="What it learns from; more of them may follow."),
]
Loss = Annotated[
    str | None, typer.Option(help="What it minimises: kl, tv, lk-alpha, lk-lambda, hass.")
]
OutFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of checkpoint, loss curve and result, the recipe's if not given."),
]
Show = Annotated[
    bool, typer.Option("--show", help="Print its config file, which says what can be set.")
]


def train(
    words: Words = None,
    given: Set = None,
    data: Data = None,
    loss: Loss = None,
    out: OutFolder = None,
    show: Show = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train by a recipe: a config file for each. An interrupted run resumes from OUT."""
    from specmm.recipes.loop import rank
    from specmm.recipes.recipe import load, recipes

    if not words:
        return typer.echo(table([("recipe", "what it trains"), *map(_summary, recipes().values())]))
    name, *rest = words
    if show:
        return typer.echo(recipes().get(name, Path(name)).read_text(encoding="utf-8"), nl=False)
    recipe = load(name)
    named = [f"data={path}" for path in data or []]
    named += [f"{key}={value}" for key, value in (("loss", loss), ("out", out)) if value]
    settings = _pairs([*(given or []), *map(_setting, rest), *named])
    with stdout_reserved():
        metrics = recipe.having(settings).run()
    if rank()[0]:
        return None  # the first process says it
    if as_json:
        return emit(metrics)
    subject = " of ".join(str(metrics[k]) for k in ("kind", "model") if k in metrics)
    say(f"trained {subject}, {metrics['steps']} steps: {', '.join(metrics['outputs'])}")


def _summary(file: Path) -> tuple[str, str]:
    """A recipe's name, and the first comment of its config file."""
    return file.stem, file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _setting(word: str) -> str:
    """A word after the recipe's name as KEY=VALUE: a setting, or the model."""
    name, equals, _ = word.partition("=")
    return word if equals and name.isidentifier() else f"model={word}"


def _pairs(texts: list[str]) -> dict[str, str | list[str]]:
    """The values of each name, as names may be repeated."""
    values_of: dict[str, list[str]] = {}
    for pair in texts:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set must be given KEY=VALUE, got {pair!r}")
        values_of.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in values_of.items()}
