"""The command line: ``specmm generate | ask | complete | batch | bench | eval | train | methods | plan | zoo | demo``.

Modules here import nothing heavy at their top, so that ``specmm --help`` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
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
    train_coder,
    train_drafters,
    train_mar,
    train_msd,
    train_var,
    train_vlm,
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
TRAINED: tuple[Callable[..., None], ...] = (
    *(train_mar.kl, train_mar.mar),
    *(train_var.vqvae, train_var.var, train_var.code),
    *(train_vlm.llava, train_vlm.projector, train_vlm.text, train_msd.msd),
    *(train_coder.coder, train_drafters.deer, train_drafters.dflash),
    *(train_drafters.diffusion, train_drafters.proxy),
)
for command in TRAINED:
    train.app.command()(command)
app.add_typer(train.app, name="train")
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
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Draft-verify acceleration, with a certificate of what each run kept of the model's law."""


def main() -> None:
    """Entry point of the ``specmm`` command."""
    app(prog_name="specmm")
