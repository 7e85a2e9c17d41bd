"""``specmm train RECIPE``: a training from its config file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specmm.cli.options import Json, Threads
from specmm.cli.output import emit, say, stdout_reserved, table

if TYPE_CHECKING:
    from specmm.recipes.recipe import Recipe

OLD = {"drafter": "emoji-drafter", "msd": "scenes-msd"}  # what old options of these names meant
UNKNOWN_OPTIONS = {"ignore_unknown_options": True}  # old options are read here
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
    out: OutFolder = None,
    show: Show = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Train by a recipe: a config file for each. An interrupted run resumes from OUT."""
    from specmm.recipes.recipe import load, recipes

    if not words:
        return typer.echo(table([("recipe", "what it trains"), *map(_listed, recipes().values())]))
    name, *rest = words
    if show:
        return typer.echo(recipes().get(name, Path(name)).read_text(encoding="utf-8"), nl=False)
    if any(word.startswith("-") for word in rest) and OLD.get(name) in recipes():
        name = OLD[name]
    recipe = load(name)
    settings = _pairs([*(given or []), *_rest(recipe, rest), *([f"out={out}"] if out else [])])
    with stdout_reserved():
        found = recipe.having(settings).run()
    if as_json:
        return emit(found)
    what = " of ".join(str(found[k]) for k in ("kind", "model") if k in found)
    say(f"trained {what}, {found['steps']} steps: {', '.join(found['outputs'])}")


def _listed(file: Path) -> tuple[str, str]:
    """A recipe's name, and what its config file says first."""
    return file.stem, file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _pairs(given: list[str]) -> dict[str, str | list[str]]:
    """Values by name; all of them where a name is repeated."""
    found: dict[str, list[str]] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set must be given KEY=VALUE, got {pair!r}")
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _rest(recipe: Recipe, words: list[str]) -> list[str]:
    """The words after the recipe's name as KEY=VALUE: settings, the model, options of old."""
    kinds: dict[str, Any] = recipe.kinds()
    pairs: list[str] = []
    old: list[str] = []
    left = iter(words)
    for word in left:
        option, equals, value = word.removeprefix("--").partition("=")
        name = recipe.current(option.replace("-", "_"))
        flag = name.removeprefix("no_")
        if not word.startswith("--"):
            pairs.append(word if equals and option.isidentifier() else f"model={word}")
        elif kinds.get(flag) is bool:
            old.append(f"{flag}={str(name == flag).lower()}")
        else:
            old.append(f"{name}={value if equals else next(left, '')}")
    if old:
        say(f"deprecated: write specmm train {recipe.name} … --set {' '.join(old)}")
    return pairs + old
