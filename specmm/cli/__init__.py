"""The command line: ``specmm generate | ask | complete | batch | bench | eval | train | methods |
plan | zoo | demo``.

Modules here import nothing heavy at their top, so that ``specmm --help`` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

import specmm
from specmm.cli import (
    ask,
    batch,
    bench,
    complete,
    demo,
    evaluate,
    generate,
    methods,
    plan,
    train,
    zoo,
)
from specmm.cli.errors import OneLine

app = typer.Typer(
    cls=OneLine,
    name="specmm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate.generate)
app.command()(ask.ask)
app.command()(batch.batch)
app.command()(bench.bench)
app.command()(complete.complete)
app.add_typer(evaluate.app, name="eval")
app.command(context_settings=train.ANY)(train.train)
app.command("methods")(methods.methods_command)
app.command()(plan.plan)
app.command()(zoo.zoo)
app.command()(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(specmm.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Draft-verify acceleration, with a certificate of what each run kept of the model's
    distribution.
    """


def main() -> None:
    """Entry point of the ``specmm`` command."""
    app(prog_name="specmm")
