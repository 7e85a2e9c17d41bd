"""``specmm inspect`` and ``specmm export``: describe a drafter, and write it for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specmm.cli.options import Json
from specmm.cli.output import emit, say, stdout_reserved

if TYPE_CHECKING:
    from specmm.hf.drafters.inspection import Inspection

Folder = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER", help="Of a drafter or a model: a folder, a pocket model or a hub id."
    ),
]
Target = Annotated[
    str | None, typer.Option("--target", help="A model, to say whether the drafter fits it.")
]
Format = Annotated[
    str, typer.Option("--format", help="speculators, eagle, specforge or checkpoint.")
]
Out = Annotated[Path, typer.Option("--out", help="The folder to write; it must not be there.")]
ExportTarget = Annotated[
    str | None,
    typer.Option("--target", help="The drafter's model, if the drafter is not in its folder."),
]


def inspect(folder: Folder, target: Target = None, as_json: Json = False) -> None:
    """Say what a drafter is, for which target, and how to use it; weights are read for --target."""
    from specmm.hf.drafters.inspection import inspect as read

    with stdout_reserved():
        inspection = read(folder, target)
    if as_json:
        return emit(inspection.as_dict())
    for line in _lines(inspection, target):
        typer.echo(line)


def export(
    drafter: Folder, layout: Format, out: Out, target: ExportTarget = None, as_json: Json = False
) -> None:
    """Write a drafter in the layout of another project."""
    from specmm.runs.export import export as write

    with stdout_reserved():
        written = write(drafter, layout, out, target)
    if as_json:
        return emit(written)
    say(f"{written['format']} written to {written['folder']} as {written['layout']}")
    if written["note"]:
        say(written["note"])


def _lines(inspection: Inspection, target: str | None) -> list[str]:
    """The description of a drafter as text, line by line."""
    lines = [f"{inspection.folder}", f"  {inspection.format}"]
    lines += [f"  {does:9} by {', '.join(names)}" for does, names in inspection.takes.items()]
    if inspection.methods:
        drafts = "drafts by" if inspection.takes else "methods"
        lines.append(f"  {drafts:9} {', '.join(inspection.methods)}")
    if said := _target_line(inspection.wanted.__dict__):
        lines.append(f"  target    {said}")
    if inspection.sizes:
        lines.append(f"  sizes     {', '.join(f'{k} {v}' for k, v in inspection.sizes.items())}")
    lines.append(f"  use       {inspection.use}")
    lines += [f"  note      {note}" for note in inspection.notes]
    if inspection.misfits is not None:
        fits = "fits" if not inspection.misfits else "does not fit"
        lines.append(f"  {fits} {target}" + "".join(f"; {why}" for why in inspection.misfits))
    for drafter in inspection.drafters:
        lines += [f"  {line}" for line in _lines(drafter, None)]
    return lines


def _target_line(wanted: dict[str, Any]) -> str:
    fields = {**wanted, "architectures": ", ".join(wanted["architectures"])}
    fields["reads"] = "layers " + " ".join(map(str, wanted["reads"])) if wanted["reads"] else None
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value)
