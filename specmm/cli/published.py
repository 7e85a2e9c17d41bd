"""``specmm zoo --published``, ``fetch`` and ``convert``: models that others publish."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specmm.cli.options import Json
from specmm.cli.output import emit, say, stdout_reserved, table

if TYPE_CHECKING:
    from specmm.zoo.published import Published

Name = Annotated[str, typer.Argument(help="A published name (specmm zoo --published) or a hub id.")]
Like = Annotated[
    str | None, typer.Option(help="The published model that a file of another name is one of.")
]
With = Annotated[
    list[str],
    typer.Option("--with", help="PART=FILE of another part, such as vae=kl16.ckpt; repeatable."),
]


def list_published(as_json: bool) -> None:
    """The registry, as a table or as JSON."""
    from specmm.zoo.published import published_models

    models = published_models().values()
    if as_json:
        return emit([model.as_dict() for model in models])
    rows = [
        (one.name, one.family, _size(one), one.licence, ", ".join(one.goes_with) or "-", one.what)
        for one in models
    ]
    typer.echo(table([("name", "family", "size", "licence", "goes with", "what"), *rows]))
    typer.echo("\nrun one by its name; specmm fetch NAME fetches it beforehand")
    typer.echo("~: by its parameters; the hub tells the files' sizes before large ones are fetched")


def _size(model: Published) -> str:
    if not model.estimate:
        return "unknown"
    return f"{'' if model.bytes else '~'}{model.estimate / 1e9:.1f} GB"


def fetch(
    name: Name,
    file: Annotated[
        str | None, typer.Option(help="Which model of a repository of several.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Instead of huggingface_hub's.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a published model's files, however large, and say where they are."""
    from specmm import zoo

    with stdout_reserved():
        folder = zoo.fetched(name, zoo.Source(file, revision, cache_dir, download=True))
    if as_json:
        return emit({"name": name, "folder": str(folder)})
    typer.echo(str(folder))


def convert(
    source: Annotated[
        str, typer.Argument(help="A release's file of weights, a published name or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there.")],
    like: Like = None,
    parts: With = [],  # noqa: B006  typer copies it
    dtype: Annotated[
        str, typer.Option(help="auto (the file's), float32, bfloat16 or float16.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Write a folder of ours, in safetensors, from a release's files."""
    from specmm.loading.hardware import named_dtype
    from specmm.runs.convert import convert as write

    with stdout_reserved():
        written = write(source, out, like, parts, named_dtype(dtype))
    if as_json:
        return emit(written)
    say(f"{written['name']} written to {written['folder']}, {written['bytes'] / 1e9:.2f} GB")
