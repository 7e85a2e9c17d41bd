"""``specmm bench``, ``plan`` and ``demo``: what the methods gain on this machine."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specmm.cli.options import (
    Device,
    Drafter,
    Dtype,
    Height,
    Json,
    Key,
    Model,
    Seed,
    Threads,
    Width,
    given,
    refuse,
)
from specmm.cli.output import emit, say, stdout_reserved, table
from specmm.loading.extras import needed
from specmm.loading.files import writable

if TYPE_CHECKING:
    from specmm.runs.run import Place

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
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a text or an answer; 64 if not given.")
]
Temperature = Annotated[
    float | None, typer.Option(help="Of texts and answers; greedy, 0, if not given.")
]


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
    max_new_tokens: Tokens = None,
    temperature: Temperature = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures or texts at a time.")] = 1,
    n: Annotated[
        int, typer.Option("-n", min=1, help="Runs of every method; medians are printed.")
    ] = 5,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    compile_all: Annotated[
        bool, typer.Option("--compile", help="Compile what can be, plain decoding too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure speed, block efficiency and likelihood; plain decoding is always the baseline.

    specmm bench serve URL loads a server instead.
    """
    from specmm.runs.benches import Bench, asked_of, kind_of
    from specmm.runs.figures import PICTURES, TEXTS, table_of
    from specmm.runs.run import Place

    seed = secrets.randbelow(2**31) if seed is None else seed
    place = Place.named(device, dtype)
    request = Bench(model, methods, drafter, place, batch, n, seed, compile_all)
    size = given(height=height, width=width)
    written = given(max_new_tokens=max_new_tokens, temperature=temperature)
    with stdout_reserved():
        kind = kind_of(model, question)
        if kind == "images":
            refuse(_drawing(model), image=image, **written)
            rows = request.pictures(prompt, size)
        else:
            rows = request.texts(asked_of(model, kind, prompt, question, image, size), **written)
    if as_json:
        return emit(rows)
    where = f"{rows[0]['dtype']}, {rows[0]['threads']} threads, seed {seed}"
    columns = PICTURES if rows[0]["kind"] == "images" else TEXTS
    typer.echo(table(table_of(rows, columns)))
    typer.echo(f"{n} runs each at batch {batch}, {where}; speed-up over plain decoding of this run")
    if compile_all:
        compiled_rows = [row["label"] for row in rows if row["compiled"]]
        typer.echo(f"compiled: {', '.join(compiled_rows) or 'none of them'}")
        for row in rows:
            if row["not_compiled"]:
                typer.echo(f"not {row['label']}: {row['not_compiled']}")


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a pocket model (see specmm zoo) or a hub id. None with --trace."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="What specmm doctor --trace wrote: no model is run; give --costs."
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Seconds of rounds of the machine that is planned for: what specmm plan --json "
            "printed there, or the same as stated."
        ),
    ] = None,
    tree: Annotated[
        list[str],
        typer.Option(help="With --trace, also this one, as 4,2,1 or 'branching(2, 2)'; several."),
    ] = [],  # noqa: B006  typer copies it
    prompt: Prompt = [],  # noqa: B006
    question: Question = [],  # noqa: B006
    image: Pictures = [],  # noqa: B006
    drafter: Drafter = None,
    height: Height = None,
    width: Width = None,
    max_new_tokens: Tokens = None,
    temperature: Temperature = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Pictures at a time; 1 if not given.")
    ] = None,
    cfg: Annotated[
        float | None,
        typer.Option(help="Guidance scale: twice the rows a step; none is 1, of VAR 0."),
    ] = None,
    tv: Annotated[
        float | None,
        typer.Option(
            help="Relaxed methods are measured, too: those off by a total variation of at most so "
            "much a token (auto with certificate=bounded)."
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure this machine, and say which tree method auto takes, or how many scales the large
    model of code draws. Texts and questions given are planned for together, as a batch.
    """
    from specmm.runs.benches import asked_of, kind_of
    from specmm.runs.plans import plan_language, plan_model, plan_traced
    from specmm.runs.run import Place

    size = given(height=height, width=width)
    written = given(max_new_tokens=max_new_tokens, temperature=temperature)
    asking = dict(question=question, image=image)
    if trace is not None:
        refuse("traces, of which no model is run", model=model, prompt=prompt, **asking, **size)
        refuse("traces, of which no model is run", **written, drafter=drafter, cfg=cfg, tv=tv)
        return _print_plan(plan_traced(trace, costs, batch, tree), as_json)
    refuse("--trace FILE", costs=costs, tree=tree)
    if model is None:
        raise ValueError("a plan needs a model, or --trace FILE of one, got neither")
    with stdout_reserved():
        place = Place.named(device, dtype)
        kind = kind_of(model, question)
        if kind == "images":
            refuse(_drawing(model), **asking, **written)
            if len(prompt) > 1:
                raise ValueError(f"a plan of pictures takes one --prompt, got {len(prompt)}")
            first = prompt[0] if prompt else None
            planned = plan_model(model, batch or 1, cfg, place, drafter, first, tv, **size)
        else:
            refuse(f"texts and answers of {model}", cfg=cfg, batch=batch, tv=tv)
            request = asked_of(model, kind, prompt, question, image, size)
            planned = plan_language(model, request, place, drafter, **written)
    _print_plan(planned, as_json)


def _print_plan(planned: tuple[dict[str, Any], list[str]], as_json: bool) -> None:
    """Print a plan."""
    facts, lines = planned
    if as_json:
        emit(facts)
    else:
        typer.echo("\n".join(lines))


def _drawing(model: str) -> str:
    return f"models that draw, such as {model}"


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder of what is made; out/demo if not given.")
    ] = None,
    model: Annotated[str, typer.Option(help="A folder or pocket model.")] = DEFAULT,
    n: Annotated[
        int | None, typer.Option("-n", min=1, help="Pictures of each of four classes; 2, if not.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same pictures; 0 if not given.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    app: Annotated[
        bool, typer.Option("--app", help="Open the app in a browser instead of making a page.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(help=f"Of the app: {LOCAL}, or 0.0.0.0 to open it to the network.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, help="Of the app; a free one if not given.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Give the app a public address, by gradio.live.")
    ] = False,
    text_encoder: Annotated[
        Path | None, typer.Option(help="Of the app: folder of the T5 encoder, for prompts.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Of the app: a chat with this server, and no models here.")
    ] = None,
    api_key: Key = "",
    as_json: Json = False,
) -> None:
    """Draw a few classes by three methods, one picture at a time, and compare; or open the app."""
    from specmm.loading.hardware import Place

    if app:
        refuse("the app, which shows what it makes", out=out, n=n, seed=seed, json=as_json)
        if server is not None:
            refuse("a chat with a server", model=model != DEFAULT, text_encoder=text_encoder)
            return _chat(server, api_key, host or LOCAL, port, share)
        extra = (model,) if model != DEFAULT else ()
        return _open(extra, host or LOCAL, port, share, Place.named(device, dtype), text_encoder)
    app_only = dict(host=host, port=port, share=share, text_encoder=text_encoder, server=server)
    refuse("the page (give --app)", **app_only)
    seed = seed or 0
    folder = writable(out or Path("out/demo"))
    place = Place.named(device, dtype)
    say(f"opening {model}, which takes some seconds; pictures go to {folder}")
    from tqdm import tqdm

    from specmm.runs.demo import compare, in_letters, notes, table_of

    def show(line: str, image: Any) -> None:
        """Show ``line`` and ``image`` without breaking the progress bar."""
        with tqdm.external_write_mode():
            if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
                say(in_letters(image))
            say(line)

    with stdout_reserved():
        rows, paths = compare(model, place, folder, n or 2, seed, say, show)
    if as_json:
        return emit({"model": model, "seed": seed, "methods": rows, "outputs": paths})
    say("")
    typer.echo(f"{table(table_of(rows))}\n\n{notes(rows)}\n")
    typer.echo(f"side by side: {Path(paths[0]).absolute().as_uri()}")


def _open(
    extra: tuple[str, ...],
    host: str,
    port: int | None,
    share: bool,
    place: Place,
    text_encoder: Path | None,
) -> None:
    """Serve the app until Ctrl-C. Any model may be typed if only this machine can reach the app.

    Raises ``ValueError`` without gradio and for a port that is taken.
    """
    from specmm.app.models import AppModels

    local = host == LOCAL and not share
    models = AppModels(extra, place, anything=local, text_encoder=text_encoder)
    with needed("the app", "app"):
        from specmm.app.page import build, serve
    say("loading the models and opening the app; Ctrl-C ends it")
    serve(build(models), host, port, share)


def _chat(server: str, key: str, host: str, port: int | None, share: bool) -> None:
    """Serve a chat with a ``server`` until Ctrl-C.

    Raises ``ValueError`` without gradio, and for a server that lists no models.
    """
    with needed("the app", "app"):
        from specmm.app.page import serve
        from specmm.app.served import Served, chat
    page = chat(Served(server, key))
    say(f"opening a chat with {server}; Ctrl-C ends it")
    serve(page, host, port, share)
