"""``specmm generate``: pictures of classes or prompts."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specmm.cli.errors import Interrupted
from specmm.cli.options import Device, Dtype, Json, Model, Options, Seed
from specmm.cli.output import emit, say, stdout_reserved, writable

if TYPE_CHECKING:
    from specmm.runs.pictures import Report

Class = Annotated[list[str], typer.Option("--class", help="Class name or id; may be repeated.")]
Prompt = Annotated[
    list[str], typer.Option("--prompt", help="Caption, for text-to-image models; may be repeated.")
]
MethodName = Annotated[
    str,
    typer.Option(
        help="LlamaGen: ar, sjd, speculative, eagle, lantern, lantern++, auto; VAR: ar, code, speculative, auto; "
        "MAR: ar, cspd."
    ),
]


def generate(
    model: Model,
    classes: Class = [],  # noqa: B006  typer copies it
    prompt: Prompt = [],  # noqa: B006
    method: MethodName = "ar",
    option: Options = [],  # noqa: B006
    n: Annotated[int, typer.Option("-n", min=1, help="Pictures of every class or prompt.")] = 1,
    seed: Seed = None,
    cfg: Annotated[float | None, typer.Option(help="Guidance scale; none is 1, of VAR 0.")] = None,
    cfg_interval: Annotated[
        int | None, typer.Option(help="Guide only this many tokens, -1 for all.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn at a time.")] = 8,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile rounds: about twice as fast, after half a minute."),
    ] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            "--steady",
            help="Pictures do not depend on --batch-size, to the last bit (float32, CPU). "
            "Called --steady until now.",
        ),
    ] = False,
    text_encoder: Annotated[
        Path | None, typer.Option(help="Folder of the T5 encoder, for --prompt.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the pictures; out/METHOD-SEED if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw pictures; each is saved as soon as its batch is done."""
    from specmm.image_ar.pipeline import family_of
    from specmm.runs.method_names import parse_method
    from specmm.runs.models import Place, open_model
    from specmm.runs.pictures import Job, check, draw

    if bool(classes) == bool(prompt):
        raise ValueError("give --class or --prompt (either may be repeated), and not both")
    chosen = parse_method(family_of(model).methods, method, option)
    seed = secrets.randbelow(2**31) if seed is None else seed
    folder = writable(out or Path("out") / f"{method}-{seed}")
    sampling = dict(
        cfg=cfg, cfg_interval=cfg_interval, temperature=temperature, top_k=top_k, top_p=top_p
    )
    sampling = {name: value for name, value in sampling.items() if value is not None}
    kind, inputs = ("classes", classes) if classes else ("prompt", prompt)
    asked = model, chosen, kind, [i for i in inputs for _ in range(n)], seed, sampling
    job = Job(*asked, batch_size, folder, compiled, batch_invariant)
    with stdout_reserved():
        pipe = open_model("images", model, Place.named(device, dtype), text_encoder=text_encoder)
        check(pipe, job)
        report = draw(pipe, job, say)
    report.save()
    if as_json:
        emit(report.as_dict())
    else:
        typer.echo(_lines(report))
    if report.interrupted:
        raise Interrupted(
            f"{len(report.outputs)} of {len(job.inputs)} pictures are finished and in {folder}"
        )


def _lines(report: Report) -> str:
    """A summary for people."""
    from specmm.stats import merged_certificate

    job, found = report.job, merged_certificate(report.certificates)
    rate = f", {report.seconds / len(report.outputs):.2f} s each" if report.outputs else ""
    first = f"{len(report.outputs)} of {len(job.inputs)} pictures by {report.ran} in {report.seconds:.1f} s{rate}"
    counts = f"{report.stats.tokens} tokens in {report.stats.rounds} rounds, tau {report.stats.tau:.2f}, "
    return "\n".join(
        [
            first + f", seed {job.seed}",
            *([f"chosen       {report.reason}"] if report.reason else []),
            counts + f"host overhead {report.stats.host_overhead:.0%}",
            f"certificate  {found or 'none'}",
            f"saved in     {job.out}",
        ]
    )
