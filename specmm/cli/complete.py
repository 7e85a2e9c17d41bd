"""``specmm complete``: text continued."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.ask import Echo, show
from specmm.cli.course import check_plot, plot_course
from specmm.cli.options import Device, Drafter, Dtype, Json, Model, Seed
from specmm.cli.output import say, stdout_reserved

Prompts = Annotated[
    list[str], typer.Option("--prompt", "-p", help="Text to continue; may be repeated for a batch.")
]
MethodName = Annotated[
    str,
    typer.Option(help="ar, diffuspec, specdiff, deer, block, text-draft, prompt-lookup or auto."),
]
CompleteOptions = Annotated[
    list[str],
    typer.Option(
        "--option",
        "-o",
        help="KEY=VALUE of the method; may be repeated. sure=… counts for a single prompt or at temperature 0 only.",
    ),
]


def complete(
    model: Model,
    prompt: Prompts,
    method: MethodName = "ar",
    option: CompleteOptions = [],  # noqa: B006  typer copies it
    drafter: Drafter = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a text.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    stop: Annotated[
        list[str], typer.Option(help="A text to end in front of; may be repeated.")
    ] = [],  # noqa: B006
    chat: Annotated[
        bool, typer.Option(help="Put the prompt into the model's chat template.")
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile rounds: small models are twice as fast, after a minute or two.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw acceptance, lengths and times into this .png, .pdf or .svg."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Continue a text; a single one is written to stderr as it comes."""
    from specmm import methods
    from specmm.runs.answers import report_of
    from specmm.runs.method_names import label, parse_method
    from specmm.runs.models import Place, open_model

    chosen = parse_method(methods.TEXT, method, option)
    if plot is not None:
        check_plot(plot)
    seed = secrets.randbelow(2**31) if seed is None else seed
    sampling = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
    )
    with stdout_reserved():
        pipe = open_model("text", model, Place.named(device, dtype), chosen, drafter)
        options: dict[str, Any] = dict(
            max_new_tokens=max_new_tokens, seed=seed, stop=stop, chat=chat, **sampling
        )
        options["compiled"] = compiled
        begin = time.perf_counter()
        out = pipe(prompt, Echo(pipe, stop) if len(prompt) == 1 else None, **options)
        seconds = time.perf_counter() - begin
    report = report_of(model, pipe, chosen, out, seed, seconds, sampling) | {
        "prompts": prompt,
        "outputs": out.texts,
    }
    show(report | _course(out), out, label(chosen), as_json)
    if not as_json:
        _tell(out)
    if plot is not None:  # last: whatever becomes of it, the text is there
        plot_course(out.stats, out.trace, plot)


def _course(out: Any) -> dict[str, Any]:
    """How drafting went: acceptance by position, lengths by round, seconds by part."""
    stats = out.stats
    return {
        "accepted_by_position": stats.accepted_by_position,
        "drafted_by_round": stats.depths,
        "controller": out.trace,
        "draft_seconds": stats.draft_seconds,
        "search_seconds": stats.search_seconds,
        "verify_seconds": stats.verify_seconds,
    }


def _tell(out: Any) -> None:
    stats = out.stats
    if stats.depths:
        say(
            "accepted by position  "
            + " ".join(f"{share:.2f}" for share in stats.accepted_by_position)
        )
        lengths = (
            f"{min(stats.depths)} to {max(stats.depths)} drafts a round, {len(stats.depths)} rounds"
        )
        searched = f" ({stats.search_seconds:.2f} s of it search)" if stats.search_seconds else ""
        say(
            f"draft {stats.draft_seconds:.2f} s{searched}, verify {stats.verify_seconds:.2f} s, {lengths}"
        )
    for row, trace in enumerate(out.trace):
        say(f"drafted/accepted of text {row + 1}  " + " ".join(f"{d}/{a}" for d, a in trace))
