"""``specmm eval``: what pictures and answers are worth, and whether two sets of them differ."""

from __future__ import annotations

import typer

from specmm.cli.evaluate import answers, distances, files, gate, pictures, report

app = typer.Typer(
    no_args_is_help=True,
    help="Measure pictures and answers, compare results, draw the report.",
    rich_markup_mode=None,
)
app.command()(distances.fid)
app.command()(distances.fd)
app.command()(distances.kid)
app.command("is")(distances.inception_score)
app.command("pr")(distances.precision_recall)
app.command("dc")(distances.density_coverage)
app.command()(distances.mifid)
app.command()(pictures.clip)
app.command()(pictures.reconstruction)
app.command()(answers.vqa)
app.command()(gate.compare)
app.command()(report.report)
app.command()(files.features)
app.command()(files.stats)
app.command()(files.weights)
