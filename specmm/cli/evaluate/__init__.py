"""``specmm eval``: the quality of pictures and answers, and whether two sets of them differ."""

from __future__ import annotations

import typer

from specmm.cli.evaluate import pictures, results

app = typer.Typer(
    no_args_is_help=True,
    help="Measure pictures and answers, compare results, draw the report.",
    rich_markup_mode=None,
)
app.command()(pictures.fid)
app.command()(pictures.fd)
app.command()(pictures.kid)
app.command("is")(pictures.inception_score)
app.command("pr")(pictures.precision_recall)
app.command()(pictures.clip)
app.command()(pictures.reconstruction)
app.command()(results.vqa)
app.command()(results.compare)
app.command()(results.report)
app.command()(pictures.features)
app.command()(pictures.stats)
app.command()(pictures.weights)
