"""``specmm generate``: pictures of classes or prompts."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from specmm.cli.errors import Interrupted
from specmm.cli.output import emit, stdout_reserved, writable, write_text

Class = Annotated[list[str], typer.Option("--class", help="Class name or id; may be repeated.")]
Prompt = Annotated[list[str], typer.Option("--prompt", help="Caption, for text-to-image models; may be repeated.")]
MethodName = Annotated[
    str,
    typer.Option(
        help="LlamaGen: ar, sjd, speculative, eagle, lantern, lantern++, auto; VAR: ar, code, speculative, auto; "
        "MAR: ar, cspd."
    ),
]
Options = Annotated[list[str], typer.Option("--option", "-o", help="KEY=VALUE of the method; may be repeated.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Without it one is drawn and printed.")]
Model = Annotated[str, typer.Argument(help="A folder, a pocket model (see specmm zoo) or a hub id.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout, all else on stderr.")]
Dtype = Annotated[str, typer.Option(help="auto (this machine's fastest), float32, bfloat16 or float16.")]


def generate(
    model: Model,
    classes: Class = [],  # noqa: B006  typer copies it
    prompt: Prompt = [],  # noqa: B006
    method: MethodName = "ar",
    option: Options = [],  # noqa: B006
    n: Annotated[int, typer.Option("-n", min=1, help="Pictures of every class or prompt.")] = 1,
    seed: Seed = None,
    cfg: Annotated[float | None, typer.Option(help="Guidance scale; none is 1, of VAR 0.")] = None,
    cfg_interval: Annotated[int | None, typer.Option(help="Guide only this many tokens, -1 for all.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures drawn at a time.")] = 8,
    dtype: Dtype = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile rounds: about twice as fast, after half a minute.")
    ] = False,
    steady: Annotated[
        bool, typer.Option("--steady", help="Pictures do not depend on --batch-size, to the last bit (float32, CPU).")
    ] = False,
    text_encoder: Annotated[Path | None, typer.Option(help="Folder of the T5 encoder, for --prompt.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the pictures; out/METHOD-SEED if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Draw pictures; each is saved as soon as its batch is done."""
    from specmm.cli.drawing import Job, check, draw, load
    from specmm.cli.parse import parse_method
    from specmm.image_ar.pipeline import family_of

    if bool(classes) == bool(prompt):
        raise ValueError("give --class or --prompt (either may be repeated), and not both")
    chosen = parse_method(family_of(model).methods, method, option)
    seed = secrets.randbelow(2**31) if seed is None else seed
    folder = writable(out or Path("out") / f"{method}-{seed}")
    sampling = dict(cfg=cfg, cfg_interval=cfg_interval, temperature=temperature, top_k=top_k, top_p=top_p)
    sampling = {name: value for name, value in sampling.items() if value is not None}
    kind, inputs = ("classes", classes) if classes else ("prompt", prompt)
    asked = model, chosen, kind, [i for i in inputs for _ in range(n)], seed, sampling
    job = Job(*asked, batch_size, folder, compiled, steady)
    with stdout_reserved():
        pipe = load(model, dtype, text_encoder)
        check(pipe, job)
        report = draw(pipe, job)
    write_text(folder / "run.json", json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n")
    if as_json:
        emit(report.as_dict())
    else:
        typer.echo(report.lines())
    if report.interrupted:
        raise Interrupted(f"{len(report.outputs)} of {len(job.inputs)} pictures are finished and in {folder}")
