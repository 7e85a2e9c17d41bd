"""``specmm generate``: pictures of classes or prompts."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specmm.cli.options import (
    Compile,
    Compiled,
    Device,
    Drafter,
    Dtype,
    Height,
    Json,
    Options,
    Seed,
    Threads,
    Width,
    compiled_as,
    given,
    refuse,
)
from specmm.cli.output import Interrupted, emit, say, stdout_reserved
from specmm.cli.starting import started, starting
from specmm.loading.files import writable

if TYPE_CHECKING:
    from specmm.runs.run import PictureRun

Class = Annotated[list[str], typer.Option("--class", help="Class name or id; may be repeated.")]
Prompt = Annotated[
    list[str], typer.Option("--prompt", help="Caption, for text-to-image models; may be repeated.")
]
MethodName = Annotated[
    str,
    typer.Option(
        help="LlamaGen: ar, sjd, gsd, speculative, eagle, lantern, lantern++, draft, "
        "auto; models of transformers: these and prompt-lookup; "
        "VAR: ar, code, auto; MAR: ar, cspd. Options in brackets, too: code(n=2)."
    ),
]


def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a pocket model (see specmm zoo) or a hub id. With --like the file's."
        ),
    ] = None,
    classes: Class = [],  # noqa: B006  typer copies it
    prompt: Prompt = [],  # noqa: B006
    negative_prompt: Annotated[
        str | None, typer.Option(help="What guidance leads away from, beside --prompt.")
    ] = None,
    height: Height = None,
    width: Width = None,
    steps: Annotated[
        int | None,
        typer.Option(help="MAR's iterations, or of the diffusion that paints GLM-Image's pixels."),
    ] = None,
    method: MethodName = "ar",
    option: Options = [],  # noqa: B006
    drafter: Drafter = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Pictures of every class or prompt.")] = 1,
    seed: Seed = None,
    cfg: Annotated[float | None, typer.Option(help="Guidance scale; off is 1, for VAR 0.")] = None,
    cfg_interval: Annotated[
        int | None, typer.Option(help="Guide only this many tokens, -1 for all.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn at a time.")] = 8,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    compile_all: Compile = False,
    compiled: Compiled = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Pictures do not depend on --batch-size, to the last bit (float32, CPU).",
        ),
    ] = False,
    text_encoder: Annotated[
        Path | None, typer.Option(help="Folder of the T5 encoder, for --prompt.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="Draw the picture in this file again, from what it records.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the pictures; out/METHOD-SEED if not given.")
    ] = None,
    as_json: Json = False,
    context: typer.Context = None,  # type: ignore[assignment]  # typer gives it
) -> None:
    """Draw pictures; each is saved as soon as its batch is done."""
    starting()
    if like is not None:
        return _again(context, like, model, out or Path("out") / "again", as_json)
    if model is None:
        raise ValueError("generate needs a MODEL (specmm zoo lists the shipped ones), or --like")
    from specmm.choose.threads import settled
    from specmm.extending.outside import with_own
    from specmm.methods.making import parse_method
    from specmm.runs import run as runs

    if bool(classes) == bool(prompt):
        raise ValueError("give --class or --prompt (either may be repeated), and not both")
    chosen = parse_method(runs.methods_of("images", model), method, option)
    chosen, drafter = with_own(runs.methods_of("images", model), chosen, drafter)
    seed = secrets.randbelow(2**31) if seed is None else seed
    sampling = given(
        cfg=cfg, cfg_interval=cfg_interval, temperature=temperature, top_k=top_k, top_p=top_p
    )
    picture_options = given(
        negative_prompt=negative_prompt, height=height, width=width, num_inference_steps=steps
    )
    run = runs.PictureRun(
        model,
        chosen,
        "classes" if classes else "prompt",
        [text for text in classes or prompt for _ in range(n)],
        seed,
        sampling,
        batch_size,
        writable(out or Path("out") / f"{chosen.name}-{seed}"),
        compiled_as(compiled, compile_all),
        batch_invariant,
        picture_options,
    )
    with stdout_reserved():
        place = runs.Place.named(device, dtype)
        pipe = runs.open_model("images", model, place, drafter=drafter, text_encoder=text_encoder)
        started()
        runs.check(pipe, run)
        with settled(pipe.transformer):
            runs.draw(pipe, run, say)
    run.save()
    if as_json:
        emit(run.as_dict())
    else:
        typer.echo(_summary(run))
    if run.interrupted:
        raise Interrupted(
            f"{len(run.outputs)} of {len(run.inputs)} pictures are finished and in {run.out}"
        )


def _again(context: typer.Context, like: Path, model: str | None, out: Path, as_json: bool) -> None:
    """Draw the picture in ``like`` again; the exit status is 1 if the result differs.

    Raises ``ValueError`` for options that would change it.
    """
    from specmm.runs.again import draw_like

    for name in context.params.keys() - {"model", "like", "out", "as_json"}:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = {"option": "o", "compile_all": "compile"}.get(name, name)
            refuse("pictures that are drawn --like one", **{option: True})
    with stdout_reserved():
        redrawn = draw_like(like, out, model, say)
    if as_json:
        emit(redrawn.as_dict())
    else:
        typer.echo(str(redrawn))
    if not redrawn.equal:
        raise typer.Exit(1)


def _summary(run: PictureRun) -> str:
    """The text to print after a run, unless JSON is requested."""
    stats = run.stats
    drawn = f"{len(run.outputs)} of {len(run.inputs)} pictures by {run.ran}"
    average = f", {run.seconds / len(run.outputs):.2f} s each" if run.outputs else ""
    lines = [f"{drawn} in {run.seconds:.1f} s{average}, seed {run.seed}"]
    if run.reason:
        decided = f"decided in {run.planning_seconds:.1f} s, not counted above"
        lines.append(f"chosen       {run.reason} ({decided})")
    counts = f"{stats.tokens} tokens in {stats.rounds} rounds, tau {stats.tau:.2f}"
    lines.append(f"{counts}, host overhead {stats.host_overhead:.0%}")
    if run.compiled:
        programs = sum(record["compiled"] for record in run.records)
        lines.append(f"compiled     {programs} of {len(run.outputs)} pictures")
    lines.append(f"certificate  {run.certificate or 'none'}")
    lines.append(f"saved in     {run.out}")
    return "\n".join(lines)
