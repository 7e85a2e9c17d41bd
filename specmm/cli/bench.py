"""``specmm bench``, ``plan`` and ``demo``: what the methods gain on this machine."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specmm.cli.options import Device, Drafter, Dtype, Height, Json, Model, Seed, Width
from specmm.cli.output import emit, say, stdout_reserved, table
from specmm.files import writable

if TYPE_CHECKING:
    from specmm.runs.run import Place

PAIR = re.compile(r"d(\d+),d(\d+)")  # depths of a large and a small VAR of published sizes
DEFAULT = "pocket/llamagen"
LOCAL = "127.0.0.1"
Prompt = Annotated[
    list[str],
    typer.Option("--prompt", "-p", help="To draw, or a text to continue; may be repeated."),
]
Question = Annotated[
    list[str], typer.Option("--question", "-q", help="What to ask; may be repeated.")
]
Pictures = Annotated[
    list[Path],
    typer.Option("--image", help="The picture of every question, or one for each in order."),
]
Tokens = Annotated[int, typer.Option(min=1, help="Most tokens of a text or an answer.")]
Temperature = Annotated[float, typer.Option(help="Of texts and answers; 0 is greedy.")]


def bench(
    model: Model,
    methods: Annotated[
        str | None,
        typer.Option(help="Comma separated, options in brackets; the family's own if left out."),
    ] = None,
    prompt: Prompt = [],  # noqa: B006  typer copies it
    question: Question = [],  # noqa: B006
    image: Pictures = [],  # noqa: B006
    drafter: Drafter = None,
    height: Height = None,
    width: Width = None,
    max_new_tokens: Tokens = 64,
    temperature: Temperature = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures or texts at a time.")] = 1,
    n: Annotated[
        int, typer.Option("-n", min=1, help="Runs of every method; medians are printed.")
    ] = 5,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure speed, block efficiency and likelihood; plain decoding is always the baseline."""
    from specmm.runs.benches import Bench, asked_of, kind_of
    from specmm.runs.figures import PICTURES, TEXTS, table_of
    from specmm.runs.run import Place

    seed = secrets.randbelow(2**31) if seed is None else seed
    asked = Bench(model, methods, drafter, Place.named(device, dtype), batch, n, seed)
    size = _size(height, width)
    with stdout_reserved():
        if kind_of(model, question) == "images":
            rows = asked.pictures(prompt, size)
        else:
            inputs = asked_of(model, kind_of(model, question), prompt, question, image, size)
            rows = asked.texts(inputs, max_new_tokens, temperature)
    if as_json:
        return emit(rows)
    where = f"{rows[0]['dtype']}, {rows[0]['threads']} threads, seed {seed}"
    columns = PICTURES if rows[0]["kind"] == "images" else TEXTS
    typer.echo(table(table_of(rows, columns)))
    typer.echo(f"{n} runs each at batch {batch}, {where}; speed-up over plain decoding of this run")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a pocket model (see specmm zoo) or a hub id; or two published sizes of "
            "VAR, as d30,d16: no weights are needed."
        ),
    ],
    prompt: Prompt = [],  # noqa: B006  typer copies it
    question: Question = [],  # noqa: B006
    image: Pictures = [],  # noqa: B006
    drafter: Drafter = None,
    height: Height = None,
    width: Width = None,
    max_new_tokens: Tokens = 64,
    temperature: Temperature = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    cfg: Annotated[
        float | None,
        typer.Option(help="Guidance scale: twice the rows a step; none is 1, of VAR 0."),
    ] = None,
    resolution: Annotated[
        int, typer.Option(help="Pixels a side of published sizes: 256 or 512.")
    ] = 256,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine, and say which tree method auto takes, or how many scales the large
    model of code draws. Texts and questions given are planned for together, as a batch.
    """
    from specmm.runs.benches import asked_of, kind_of
    from specmm.runs.plans import plan_language, plan_model, plan_published
    from specmm.runs.run import Place

    size = _size(height, width)
    with stdout_reserved():
        pair = PAIR.fullmatch(model)
        if pair and device == "auto":
            device = "cpu"
        place = Place.named(device, dtype)
        if pair:
            large, small = map(int, pair.groups())
            found, lines = plan_published(large, small, resolution, batch, cfg, place)
        elif kind_of(model, question) == "images":
            if len(prompt) > 1:
                raise ValueError(f"a plan of pictures is of one --prompt, got {len(prompt)}")
            first = prompt[0] if prompt else None
            found, lines = plan_model(model, batch, cfg, place, drafter, first, **size)
        else:
            asked = asked_of(model, kind_of(model, question), prompt, question, image, size)
            options = dict(max_new_tokens=max_new_tokens, temperature=temperature)
            found, lines = plan_language(model, asked, place, drafter, **options)
    if as_json:
        emit(found)
    else:
        typer.echo("\n".join(lines))


def _size(height: int | None, width: int | None) -> dict[str, int]:
    sides = {"height": height, "width": width}
    return {name: side for name, side in sides.items() if side is not None}


def demo(
    out: Annotated[Path, typer.Option(help="Folder of what is made.")] = Path("out/demo"),
    model: Annotated[str, typer.Option(help="A folder or pocket model.")] = DEFAULT,
    n: Annotated[int, typer.Option("-n", min=1, help="Pictures of each of four classes.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same pictures.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    app: Annotated[
        bool, typer.Option("--app", help="Open the app in a browser instead of making a page.")
    ] = False,
    host: Annotated[str, typer.Option(help="Of the app: 0.0.0.0 opens it to the network.")] = LOCAL,
    port: Annotated[
        int | None, typer.Option(min=0, help="Of the app; a free one if not given.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Give the app a public address, by gradio.live.")
    ] = False,
    text_encoder: Annotated[
        Path | None, typer.Option(help="Of the app: folder of the T5 encoder, for prompts.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a few classes by three methods, one picture at a time, and compare them; or open the
    app.
    """
    from specmm.runs import figures
    from specmm.runs.run import Place

    if app:
        extra = (model,) if model != DEFAULT else ()
        return _open(extra, host, port, share, Place.named(device, dtype), text_encoder)
    folder = writable(out)
    with stdout_reserved():
        place = Place.named(device, dtype)
        rows, paths = figures.compare(model, place, folder, n, seed, say)
    if as_json:
        return emit({"model": model, "seed": seed, "methods": rows, "outputs": paths})
    typer.echo(table(figures.table_of(rows, figures.COLUMNS)))
    typer.echo(figures.notes(rows))
    typer.echo("\n".join(paths[:2]))


def _open(
    extra: tuple[str, ...],
    host: str,
    port: int | None,
    share: bool,
    place: Place,
    text_encoder: Path | None,
) -> None:
    """Serve the app until Ctrl-C. Any model may be typed where nobody else reaches it.

    Raises ``ValueError`` without gradio and for a port that is taken.
    """
    from specmm.app.models import AppModels

    alone = host == LOCAL and not share
    models = AppModels(extra, place, anything=alone, text_encoder=text_encoder)
    try:
        from specmm.app.page import build, serve
    except ModuleNotFoundError as error:
        raise ValueError(f"the app needs {error.name}, run: pip install 'specmm[app]'") from error
    say("loading the models and opening the app; Ctrl-C ends it")
    serve(build(models), host, port, share)
