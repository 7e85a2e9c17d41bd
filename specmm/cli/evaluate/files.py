"""``specmm eval features | stats | weights``: what later measurements start from, and where
networks come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.evaluate.measured import reading
from specmm.cli.evaluate.options import Source
from specmm.cli.evaluate.sources import Reader, is_reference
from specmm.cli.options import Json
from specmm.cli.output import emit, say, stdout_reserved, table, writable
from specmm.registry import unknown

FORMATS: dict[str, Any] = {
    "ours": "specmm",
    "adm": "adm",
    "clean-fid": "clean-fid",
    "torch-fidelity": "torch-fidelity",
}
Out = Annotated[Path, typer.Option(help="The file to write.")]


@reading("inception")
def features(source: Source, out: Out, reader: Reader, as_json: Json = False) -> None:
    """Write the features of pictures to an .npz, from which every distance can be had without the
    network.
    """
    if out.suffix != ".npz":
        raise ValueError(f"features are written to .npz, got {out.name}; rename it")
    writable(out.parent)
    with stdout_reserved():
        found = reader.features(source)
        found.save(out)
    _written(out, len(found), found.values.shape[1], found.protocol, as_json)


@reading("inception")
def stats(
    source: Source,
    out: Out,
    reader: Reader,
    layout: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "ours",
    as_json: Json = False,
) -> None:
    """Write reference statistics of pictures or features, or those of another file in another
    format.
    """
    if layout not in FORMATS:
        raise unknown("format", layout, FORMATS)
    from specmm.metrics.references import read_reference, write_reference

    if layout == "adm" and not is_reference(source):
        raise ValueError(
            "the adm format needs spatial features too, which no network here gives; use --format ours"
        )
    writable(out.parent)
    with stdout_reserved():
        found = reader.gaussian(source)
        spatial = read_reference(Path(source), spatial=True) if layout == "adm" else None
        write_reference(found, out, FORMATS[layout], spatial=spatial)
    _written(out, found.count, len(found.moments()[0]), found.protocol, as_json)


def weights(as_json: Json = False) -> None:
    """Where the weights of every network are looked for, whether they are there, and how to get
    them.
    """
    with stdout_reserved():
        from specmm.metrics.weights import weights_folder, weights_table

        rows, folder = weights_table(), weights_folder()
    if as_json:
        emit({"folder": str(folder), "weights": rows})
        return
    here = [
        (r["name"], "no" if r["found"] == "no" else "yes", r["what"], r["licence"]) for r in rows
    ]
    typer.echo(table([("name", "here", "what", "licence"), *here]) + "\n")
    typer.echo(
        "\n".join(f"{r['name']}: {r['get'] if r['found'] == 'no' else r['found']}" for r in rows)
        + "\n"
    )
    typer.echo(
        f"looked for in {folder} ($SPECMM_WEIGHTS), installed packages, torch hub's cache and the HF cache; "
        "without a network, copy the file there from another machine, or name it with --weights"
    )


def _written(
    out: Path, count: int | None, width: int, protocol: dict[str, Any], as_json: bool
) -> None:
    if as_json:
        emit({"out": str(out), "count": count, "width": width, "protocol": protocol})
    else:
        say(f"{'unknown' if count is None else count} samples of {width} features are in {out}")
