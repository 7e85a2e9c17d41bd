"""``specmm batch``: many pictures or answers from a list, exactly once each, across restarts."""

from __future__ import annotations

from datetime import timedelta
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from specmm.cli.options import Compiled, Device, Dtype, Json, Options, Threads, compiled_as, given
from specmm.cli.output import Interrupted, emit, say, stdout_reserved
from specmm.loading.extras import install
from specmm.loading.files import place, reached, writable

if TYPE_CHECKING:
    from specmm.jobs.progress import Progress

Jobs = Annotated[
    str,
    typer.Argument(
        metavar="JOBS",
        help=".jsonl, .csv or .parquet of items, or .txt with one class a line; a path or address.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="A folder, a pocket model (see specmm zoo) or a hub id.")
]
Real = float | None
T = TypeVar("T")


def batch(
    jobs: Jobs,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder of the results, or an address (s3://…); a stopped job is resumed in it."
        ),
    ] = None,
    model: Model = None,
    method: Annotated[str, typer.Option(help="Default method for items without one.")] = "ar",
    option: Options = [],  # noqa: B006  typer copies it
    engine: Annotated[
        str, typer.Option(help="local, accelerate (under torchrun or accelerate launch) or ray.")
    ] = "local",
    image_format: Annotated[
        str, typer.Option("--format", help="png, webp (lossless) or jpeg.")
    ] = "png",
    layout: Annotated[str, typer.Option(help="folders, or tar: webdataset archives.")] = "folders",
    parquet: Annotated[bool, typer.Option("--parquet", help="Write index.parquet, too.")] = False,
    batch_size: Annotated[int, typer.Option(min=0, help="Items at a time; 0 finds the best.")] = 0,
    retries: Annotated[int, typer.Option(min=0, help="More tries for an item that fails.")] = 2,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try items again that were set aside.")
    ] = False,
    shard_size: Annotated[int, typer.Option(min=1, help="Items per archive.")] = 1000,
    workers: Annotated[
        int, typer.Option(min=0, help="Actors of engine ray; 0 is one a GPU or core.")
    ] = 0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="With an item's id it makes the item's seed.")
    ] = 0,
    cfg: Annotated[Real, typer.Option(help="Guidance scale; none is 1, of VAR 0.")] = None,
    temperature: Annotated[Real, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[Real, typer.Option(help="1 is off.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.")
    ] = None,
    draw: Annotated[
        bool,
        typer.Option(
            "--draw",
            help="Let answers hold pictures, of a model that draws; a line's own draw goes first.",
        ),
    ] = False,
    compiled: Compiled = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    drafter: Annotated[
        str | None, typer.Option(help="Folder of the drafter, if it is not beside the model.")
    ] = None,
    text_encoder: Annotated[
        str | None, typer.Option(help="Folder of the T5 encoder, for prompts.")
    ] = None,
    price: Annotated[
        Real, typer.Option(min=0, help="Price per machine hour; prints the total cost.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, help="Serve Prometheus metrics on 127.0.0.1.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check OUT instead of working on it.")
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Say how far the job is; JOBS may be its folder then.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Make damaged and missing results again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make every item of JOBS once. Started again after it was killed, it resumes.

    The exit status is 0 when every item is done, 1 when items failed (under --engine accelerate 0,
    or the launcher would end the other ranks), 2 for a mistake in the arguments and 130 after
    Ctrl-C.
    """
    if status:
        return _status(place(out or jobs), as_json)
    file, folder = place(jobs), place(_required(out, "a folder for its results, give --out FOLDER"))
    if verify:
        return _verify(file, folder, as_json)
    from specmm.extending.outside import of_others
    from specmm.jobs.engines import run_job
    from specmm.jobs.folder import Job, Limits, Spec
    from specmm.jobs.items import read_items
    from specmm.jobs.progress import Metrics
    from specmm.jobs.workers import kind_of_work
    from specmm.methods.making import parse_method
    from specmm.runs.run import Place, methods_of

    model = _required(model, "a model, give --model NAME (specmm zoo lists the shipped ones)")
    with reached(file):
        items = read_items(file, seed)
    sampling = given(
        cfg=cfg,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        draw=draw or None,
    )
    with stdout_reserved(), reached(folder):
        # errors about this machine come before any work
        if parquet and util.find_spec("pyarrow") is None:
            raise ValueError(f"--parquet needs pyarrow, run: {install('batch')}")
        if engine == "local":
            Place.named(device)
        kind = kind_of_work(model, items.kinds)
        parse_method(methods_of(kind, model), method, option)
        if draw and kind != "questions":
            raise ValueError(f"--draw is for jobs of questions, got {kind}; leave it out")
        if drafter is not None and of_others(drafter):
            raise ValueError(
                f"--drafter must be a folder, got your own drafter {drafter}; give --method draft "
                f"-o drafter={drafter}"
            )
        if workers and engine != "ray":
            raise ValueError("--workers is for --engine ray; leave it out")
        spec = Spec(
            model,
            method,
            tuple(option),
            sampling,
            seed,
            dtype,
            image_format,
            layout,
            drafter,
            text_encoder,
            compiled_as(compiled, False),
        )
        limits = Limits(batch_size, retries, shard_size, device, workers)
        job = Job(writable(folder), spec, limits, frozenset(items.kinds))
        metrics = None if metrics_port is None else Metrics(metrics_port)
        if metrics is not None:
            say(f"metrics at http://127.0.0.1:{metrics.port}/metrics")
        summary, counts = run_job(job, items, engine, parquet, retry_failed, repair, metrics)
    _report(summary, counts, price, folder, as_json)
    if summary["failed"] and engine != "accelerate":
        raise typer.Exit(1)


def _required(value: T | None, what: str) -> T:
    if value is None:
        raise ValueError(f"batch needs {what}")
    return value


def _verify(jobs: Path, out: Path, as_json: bool) -> None:
    """Print the contents of OUT, and exit with status 1 if any of it is wrong."""
    from specmm.jobs.folder import read_spec
    from specmm.jobs.items import read_items
    from specmm.jobs.verify import verify

    with reached(out):
        counts = vars(verify(out, read_items(jobs, read_spec(out).seed)))
    problems = counts["problems"]
    if as_json:
        emit(counts)
    else:
        typer.echo(f"{_counts(counts)}, {counts['left']} left")
        typer.echo("\n".join(problems) or "every file is whole and belongs to one item")
        if problems:
            say("the job's command with --repair makes damaged and missing results again")
    raise typer.Exit(1 if problems else 0)


def _counts(counts: dict[str, Any]) -> str:
    return f"{counts['done']} of {counts['items']} items done, {counts['failed']} set aside"


def _status(folder: Path, as_json: bool) -> None:
    """Print how far the job in ``folder`` is."""
    from specmm.jobs.verify import status

    with reached(folder):
        report = status(folder)
    if as_json:
        return emit(report)
    typer.echo(f"{_counts(report)}, {report['left']} left")
    if report["seconds_left"]:
        left = timedelta(seconds=round(report["seconds_left"]))
        workers = f"{report['workers']} worker{'s' * (report['workers'] != 1)}"
        typer.echo(f"{report['rate']:.2f} a second lately by {workers}, {left} left at that rate")
    if report["seconds_since_last"] is not None:
        since = timedelta(seconds=round(report["seconds_since_last"]))
        typer.echo(f"the last result came {since} ago")


def _report(
    summary: dict[str, Any], counts: Progress, price: float | None, out: Path, as_json: bool
) -> None:
    """Print a summary of the run; raises ``Interrupted`` after Ctrl-C."""
    now = {
        "done_now": counts.done,
        "wall_seconds": counts.seconds,
        "interrupted": counts.interrupted,
        "out": str(out),
    }
    if price is not None:
        now["cost"] = price * counts.seconds / 3600
    if as_json:
        emit({**summary, **now})
    else:
        typer.echo(f"{_counts(summary)}, in {out}")
        rate = f", {counts.done / counts.seconds:.2f} a second" if counts.done else ""
        cost = f", cost {now['cost']:.4f}" if price is not None else ""
        typer.echo(f"{counts.done} of them now in {counts.seconds:.1f} s{rate}{cost}")
        if "repaired" in summary:
            typer.echo(_repaired(summary["repaired"], summary["repaired_otherwise"]))
    if counts.interrupted:
        raise Interrupted("all finished results are kept; run the same command again to continue")
    if count := summary["failed"]:
        failed = f"{count} item{'s' * (count != 1)} failed, see {out / 'failed.jsonl'}"
        say(f"{failed}; --retry-failed tries again")


def _repaired(repaired: int, otherwise: int) -> str:
    """A line on the outcome of a repair."""
    if not repaired:
        return "nothing was damaged or missing"
    same = "bit for bit"
    if otherwise:
        same = f"{otherwise} of them with other bytes: rounded by what is made beside them"
    return f"{repaired} damaged or missing results made again, {same}"
