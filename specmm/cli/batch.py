"""``specmm batch``: many pictures or answers from a list, exactly once each; it goes on where it
was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.errors import Interrupted
from specmm.cli.options import Device, Dtype, Json, Options
from specmm.cli.output import emit, say, stdout_reserved, writable

Jobs = Annotated[
    Path, typer.Argument(help=".jsonl, .csv or .parquet of items, or .txt with one class a line.")
]
Model = Annotated[
    str | None, typer.Option(help="A folder, a pocket model (see specmm zoo) or a hub id.")
]
Real = float | None


def batch(
    jobs: Jobs,
    out: Annotated[
        Path, typer.Option(help="Folder of the results; the same one goes on with a stopped job.")
    ],
    model: Model = None,
    method: Annotated[
        str, typer.Option(help="Of items that name none; as for generate and ask.")
    ] = "ar",
    option: Options = [],  # noqa: B006  typer copies it
    engine: Annotated[
        str, typer.Option(help="local, accelerate (under torchrun or accelerate launch) or ray.")
    ] = "local",
    image_format: Annotated[
        str, typer.Option("--format", help="png, webp (lossless) or jpeg.")
    ] = "png",
    layout: Annotated[str, typer.Option(help="folders, or tar: webdataset archives.")] = "folders",
    parquet: Annotated[bool, typer.Option("--parquet", help="Write index.parquet, too.")] = False,
    batch_size: Annotated[int, typer.Option(min=0, help="Items at a time; 0 finds it out.")] = 0,
    retries: Annotated[int, typer.Option(min=0, help="More tries for an item that fails.")] = 2,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Take up items that were set aside.")
    ] = False,
    shard_size: Annotated[int, typer.Option(min=1, help="Items an archive.")] = 1000,
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
    dtype: Dtype = "auto",
    device: Device = "cpu",
    drafter: Annotated[
        str | None, typer.Option(help="Folder of the drafter, for questions.")
    ] = None,
    text_encoder: Annotated[
        str | None, typer.Option(help="Folder of the T5 encoder, for prompts.")
    ] = None,
    price: Annotated[
        Real, typer.Option(min=0, help="Of an hour of this machine: the cost is printed.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, help="Serve Prometheus metrics on 127.0.0.1.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check OUT instead of working on it.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Make results that are damaged or missing again, bit for bit."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make every item of JOBS once; killed at any moment and started again, it goes on where it
    was.

    The exit status is 0 when every item is done, 1 when items failed (under --engine accelerate 0,
    or the launcher would end the other ranks), 2 for a mistake in the arguments and 130 after
    Ctrl-C.
    """
    from specmm.jobs.items import read_items

    if verify:
        _verify(jobs, out, as_json)
        return
    if model is None:
        raise ValueError(
            "batch needs a model, give --model NAME (specmm zoo lists those that are here)"
        )
    items = read_items(jobs, seed)
    sampling = dict(
        cfg=cfg, temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens
    )
    sampling = {name: value for name, value in sampling.items() if value is not None}
    with stdout_reserved():
        from specmm.jobs.spec import Limits, Spec
        from specmm.jobs.workers import kind_of_items
        from specmm.runs.method_names import parse_method
        from specmm.runs.models import methods_of

        _check_machine(parquet, device, engine)
        parse_method(methods_of(kind_of_items(model, items), model), method, option)
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
        )
        limits = Limits(batch_size, retries, shard_size, device)
        asked = BatchRun(
            items,
            writable(out),
            spec,
            limits,
            engine,
            workers,
            parquet,
            retry_failed,
            repair,
            metrics_port,
        )
        summary, counts, seconds = asked.run()
    _report(summary, counts, seconds, price, out, as_json)
    if summary["failed"] and engine != "accelerate":
        raise typer.Exit(1)


def _check_machine(parquet: bool, device: str, engine: str) -> None:
    """Raise ``ValueError`` before any work for what this machine lacks."""
    from importlib.util import find_spec

    from specmm.hardware import named_device

    if parquet and find_spec("pyarrow") is None:
        raise ValueError("--parquet needs pyarrow, run: pip install 'specmm[batch]'")
    if engine == "local":
        named_device(device)


@dataclass
class BatchRun:
    """A job as it was asked for on the command line."""

    items: Sequence[Any]
    out: Path
    spec: Any
    limits: Any
    engine: str
    workers: int
    parquet: bool
    retry_failed: bool
    repair: bool
    metrics_port: int | None

    def __post_init__(self) -> None:
        from specmm.jobs.engines import ENGINES
        from specmm.registry import unknown

        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)

    def run(self) -> tuple[dict[str, Any], Any, float]:
        """The summary of the whole job, what this process did of it, and its seconds."""
        from specmm.jobs.engines import share
        from specmm.jobs.finish import finish
        from specmm.jobs.run import pending
        from specmm.jobs.spec import prepare
        from specmm.jobs.watch import Bar, Metrics

        prepare(self.out, self.spec)
        mine = share(self.items) if self.engine == "accelerate" else list(self.items)
        damaged = self._damaged()
        left = pending(self.out, mine, self.retry_failed, damaged)
        metrics = None if self.metrics_port is None else Metrics(self.metrics_port)
        if metrics is not None:
            say(f"metrics at http://127.0.0.1:{metrics.port}/metrics")
        begin = time.perf_counter()
        with Bar(len(mine), len(mine) - len(left), metrics) as bar:
            counts = self._work(left, bar)
        seconds = time.perf_counter() - begin
        if metrics is not None:
            metrics.close()
        summary = finish(self.out, self.spec, self.items, self.limits.shard, self.parquet)
        return summary | self._repaired(damaged, {item.id for item in mine}), counts, seconds

    def _damaged(self) -> dict[str, Any]:
        """What a repair is to make again, by id."""
        from specmm.jobs.verify import damage, unpack_torn

        if not self.repair:
            return {}
        unpack_torn(self.out)
        return damage(self.out)

    def _repaired(self, damaged: dict[str, Any], mine: set[str]) -> dict[str, int]:
        """How many results were made again, and how many of them have other bytes than before."""
        from specmm.jobs.journal import ledger
        from specmm.jobs.store import JOURNALS

        if not self.repair:
            return {}
        now = ledger(self.out / JOURNALS)
        again = [i for i in damaged if i in mine]
        other = [i for i in again if now[i].get("sha256") != damaged[i].sha256]
        return {"repaired": len(again), "repaired_otherwise": len(other)}

    def _work(self, left: list[Any], bar: Any) -> Any:
        from specmm.jobs.cluster import run_ray
        from specmm.jobs.engines import run_local, run_rank

        common = (self.out, self.spec, self.limits, left, bar)
        if self.engine == "ray":
            return run_ray(*common, actors=self.workers)
        return (run_rank if self.engine == "accelerate" else run_local)(*common)


def _verify(jobs: Path, out: Path, as_json: bool) -> None:
    """Print what is in OUT and exit with status 1 if any of it is wrong."""
    from specmm.jobs.items import read_items
    from specmm.jobs.spec import read_spec
    from specmm.jobs.verify import verify

    found = verify(out, read_items(jobs, read_spec(out).seed))
    if as_json:
        emit(found.as_dict())
    else:
        typer.echo(
            f"{found.done} of {found.items} items done, {found.failed} set aside, {found.left} left"
        )
        typer.echo("\n".join(found.problems) or "every file is whole and belongs to one item")
        if found.problems:
            say(
                "the same command as the job's, with --repair, makes damaged and missing results again"
            )
    raise typer.Exit(1 if found.problems else 0)


def _report(
    summary: dict[str, Any], counts: Any, wall: float, price: float | None, out: Path, as_json: bool
) -> None:
    now = {
        "done_now": len(counts.done),
        "wall_seconds": wall,
        "interrupted": counts.interrupted,
        "out": str(out),
    }
    if price is not None:
        now["cost"] = price * wall / 3600
    if as_json:
        emit({**summary, **now})
    else:
        typer.echo(
            f"{summary['done']} of {summary['items']} items done, {summary['failed']} set aside, in {out}"
        )
        rate = f", {len(counts.done) / wall:.2f} a second" if counts.done else ""
        cost = f", cost {now['cost']:.4f}" if price is not None else ""
        typer.echo(f"{len(counts.done)} of them now in {wall:.1f} s{rate}{cost}")
        if "repaired" in summary:
            typer.echo(_told(summary["repaired"], summary["repaired_otherwise"]))
    if counts.interrupted:
        raise Interrupted("everything finished is kept; run the same command again to go on")
    if summary["failed"]:
        say(
            f"{summary['failed']} items failed, see {out / 'failed.jsonl'}; --retry-failed tries them again"
        )


def _told(repaired: int, otherwise: int) -> str:
    """What a repair did."""
    if not repaired:
        return "nothing was damaged or missing"
    same = (
        "bit for bit"
        if not otherwise
        else f"{otherwise} of them with other bytes: this machine rounds otherwise"
    )
    return f"{repaired} damaged or missing results made again, {same}"
