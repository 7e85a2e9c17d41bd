"""``specmm eval report``: speed against quality of several methods, a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specmm.cli.options import Json
from specmm.cli.output import emit, stdout_reserved, writable, write_text

FLOOR = (
    "real against real"  # the benchmarks' name for the row of two halves of the training pictures
)


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="What bench and eval fid printed with --json; or .csv of rows."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.md and report.png.")] = Path(
        "out/report"
    ),
    as_json: Json = False,
) -> None:
    """Draw FID over speed-up of several methods, and write the table that belongs to it."""
    with stdout_reserved():
        from specmm.metrics.picture import draw_trade
        from specmm.metrics.report import COLUMNS, joined, read_files, table

        speed, quality = read_files(results)
        rows = joined(speed, quality)
        floor = next((r["fid"] for r in quality if r["method"] == FLOOR), None)
        text = table(rows, COLUMNS)
        writable(out)
        picture = draw_trade(rows, out / "report.png", floor)
        write_text(
            out / "report.md",
            f"# Speed against quality\n\n{text}\n\n![FID over speed-up](report.png)\n",
        )
    if as_json:
        emit({"rows": rows, "outputs": [str(out / "report.md"), str(picture)]})
    else:
        typer.echo(f"{text}\n\n{out / 'report.md'}\n{picture}")
