"""The command line: ``specmm generate | ask | complete | serve | batch | bench | eval | train |
doctor | inspect | export | fetch | convert | methods | plan | zoo | demo``.

Modules here import nothing heavy at their top, so that ``specmm --help`` is quick.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

import specmm
from specmm.cli import (
    batch,
    bench,
    catalog,
    doctor,
    drafters,
    evaluate,
    generate,
    language,
    published,
    serve,
    train,
)
from specmm.cli.output import OneLine, OwnOrOther
from specmm.cli.starting import quick_end

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
app.command()(language.ask)
app.command()(serve.serve)
app.command()(batch.batch)
measuring = typer.Typer(cls=OwnOrOther, help=bench.bench.__doc__, rich_markup_mode=None)
measuring.command(OwnOrOther.own, hidden=True)(bench.bench)
measuring.command("serve")(serve.bench_serve)
app.add_typer(measuring, name="bench")
app.command()(language.complete)
app.add_typer(evaluate.app, name="eval")
app.command()(train.train)
app.command()(doctor.doctor)
app.command()(drafters.inspect)
app.command()(drafters.export)
app.command()(published.fetch)
app.command()(published.convert)
app.command("methods")(catalog.methods_command)
app.command()(bench.plan)
app.command()(catalog.zoo)
app.command()(bench.demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(specmm.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
    load: Annotated[
        list[str],
        typer.Option(help="A Python file or module that registers drafters, rules or trees."),
    ] = [],  # noqa: B006  typer copies it
) -> None:
    """Draft-verify acceleration, with a certificate of how a run keeps the model's distribution."""
    if load:
        from specmm.extending import extension

        for file in load:
            extension.load(file)


# Threads that wait for one another soon sleep: where other programs run, to wait awake costs a time
# slice a product. GNU's OpenMP reads the second name, others the first.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def main() -> None:
    """Entry point of the ``specmm`` command."""
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)  # before torch is imported
    with quick_end():
        app(prog_name="specmm")
