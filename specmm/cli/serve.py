"""``specmm serve``, and ``specmm bench serve``, which measures any server of that protocol."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.options import Device, Drafter, Dtype, Json, Key, Threads, given
from specmm.cli.output import emit, say, stdout_reserved, table
from specmm.cli.starting import started, starting
from specmm.loading.extras import needed


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Folders, pocket models (see specmm zoo) or hub ids."
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="Of answers: auto, ar, suffix or the drafter's; of pictures without one."
        ),
    ] = "auto",
    drafter: Drafter = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers made at a time, of each model.")] = 16,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait for a row; others get a 429.")
    ] = 256,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most of an answer; else 1024, unless a request asks for more."),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Most of an answer, from its request on.")
    ] = 600.0,
    prefix_memory: Annotated[
        float, typer.Option(min=0, help="GiB of what was read before, of each model; 0 keeps none.")
    ] = 1.0,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Key = "",
    http_pictures: Annotated[
        bool,
        typer.Option(
            "--allow-http-pictures",
            help="Fetch pictures from http(s) addresses of public machines.",
        ),
    ] = False,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that requests have to end after SIGTERM.")
    ] = 30.0,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Servers behind one address, by Ray Serve.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Serve models by OpenAI's protocol: chats, completions and pictures, at /v1.

    After SIGTERM or Ctrl-C running requests are finished; a second signal ends them.
    """
    starting()
    with needed("serve", "serve"):
        from specmm.serving.opening import application
        from specmm.serving.process import Server
    from specmm.loading.hardware import Place
    from specmm.serving.asking import Settings
    from specmm.serving.preparation import Limits

    if len(set(models)) < len(models):
        raise ValueError("each MODEL is served once, got one twice")
    if drafter is not None and len(models) > 1:
        raise ValueError("--drafter is of one MODEL, got several; serve them apart")
    place = Place.named(device, dtype)
    prefix_bytes = int(prefix_memory * 2**30)
    limits = Limits(
        rows, max_waiting, seconds=max_seconds, prefixes=prefix_bytes, **given(answer=max_tokens)
    )
    settings = Settings(api_key, http_pictures, max_tokens=max_tokens, max_waiting=max_waiting)
    build = partial(application, models, place, method, drafter, limits, settings)
    if replicas is not None:
        from specmm.serving.replicas import run

        needs = {"num_cpus": threads or 1} | ({"num_gpus": 1} if device == "cuda" else {})
        ongoing = rows + max_waiting
        at = f"http://{host}:{port}"
        run(build, replicas, host, port, drain, ongoing, needs, lambda: _serving(models, at))
        return
    with stdout_reserved():
        server = Server(build(), host, port, drain)
        started()
    _serving(models, server.address)
    server.run()


def _serving(models: list[str], address: str) -> None:
    say(f"serving {', '.join(models)} at {address}")


def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Such as http://127.0.0.1:8000.")],
    clients: Annotated[
        int | None, typer.Option(min=1, help="Clients, each of whom waits for an answer; 1.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Or arrivals a second, as a Poisson process.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Or JSON lines of requests, of which each says its second, at."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Lines of text, or JSON lines with messages or a prompt; else our own."),
    ] = None,
    completions: Annotated[
        bool, typer.Option("--completions", help="Continue texts instead of asking them in a chat.")
    ] = False,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Requests; 64 if not given.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    model: Annotated[str | None, typer.Option(help="The server's first if not given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the arrivals.")] = 0,
    api_key: Key = "",
    as_json: Json = False,
) -> None:
    """Load a server of OpenAI's protocol: tokens a second, seconds to the first token, between
    tokens, between pieces of a stream, and of whole answers.
    """
    with needed("bench serve", "serve"):
        from specmm.runs.load import Load, bodies_of, run

    ways = [way for way in (clients, rate, trace) if way is not None]
    if len(ways) > 1 or (trace is not None and (prompts is not None or n is not None)):
        raise ValueError("give one of --clients, --rate and --trace, and with a trace no prompts")
    bodies = bodies_of(trace or prompts, completions)
    count = len(bodies) if trace is not None else n or 64
    load = Load(url, bodies, count, max_tokens, temperature, model, api_key, seed)
    result = run(load, clients if ways else 1, rate)
    if as_json:
        emit(result)
    else:
        typer.echo(_load_table(result))


def _load_table(result: dict[str, Any]) -> str:
    """The result of a load test as text."""
    from specmm.runs.load import failures

    each = (
        f"{result['tokens_per_second']:.1f} tokens/s, {result['requests_per_second']:.2f} answers/s"
    )
    lines = [f"{result['requests']} requests in {result['seconds']:.1f} s: {each}"]
    rows = [["seconds", "p50", "p90", "p99"]]
    for name in ("first_token", "between_tokens", "pause", "answer"):
        values = result[name].values()
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        rows.append([name.replace("_", " "), *cells])
    return "\n".join([*lines, table(rows), *failures(result)])
