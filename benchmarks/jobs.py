"""What a batch job gains and what its engines cost: ``python -m benchmarks.jobs --ray``.

Throughput of ``specmm batch`` against a plain loop of ``pipe()`` at batch 1 (bar: 2x) and of one
rank under a launcher's environment (bar: 1.05 of the local engine), interleaved, in one process.
With ``--ray`` also of one actor (bar: 1.15): the seconds of all items less those of one, since an
actor loads the model itself. Every picture is compared: all must be bit-equal.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import File, environment, show
from specmm.jobs.engines import run_job
from specmm.jobs.folder import RESULTS, Job, Limits, Spec
from specmm.jobs.items import Item, seed_of
from specmm.jobs.workers import ImageWorker


def items_of(count: int, classes: int) -> list[Item]:
    return [
        Item(f"bench/{i}", "class", str(i % classes), seed_of(f"bench/{i}", 0))
        for i in range(count)
    ]


def loop(worker: ImageWorker, items: Sequence[Item], folder: Path) -> float:
    """Seconds of what a person would write: one call a picture, saved as PNG."""
    begin = time.perf_counter()
    for number, item in enumerate(items):
        generator = [torch.Generator().manual_seed(item.seed)]
        out = worker.pipe(classes=[item.text], generator=generator, method=worker.methods.own)
        out.images[0].save(folder / f"{number}.png")
    return time.perf_counter() - begin


def job(
    worker: Any, items: Sequence[Item], folder: Path, batch: int, engine: str = "local"
) -> float:
    """Seconds of a whole job: every file synced, journal and index written."""
    begin = time.perf_counter()
    limits = Limits(batch, actors=int(engine == "ray"))
    opener = {} if engine == "ray" else {"opener": lambda *_: worker}
    run_job(Job(folder, worker.spec, limits), items, engine, **opener)
    return time.perf_counter() - begin


def pictures(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (folder / RESULTS).rglob("*.png")}


def measure(
    worker: ImageWorker, items: Sequence[Item], rounds: int, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows of seconds: the loop, jobs by batch size, a rank; in turns."""
    os.environ.update(RANK="0", WORLD_SIZE="1")
    ways: dict[str, Callable[[Path], float]] = {"loop": lambda folder: loop(worker, items, folder)}
    for size in batches:
        ways[f"local, batch {size or 'auto'}"] = lambda folder, size=size: job(
            worker, items, folder, size
        )
    ways["accelerate, one rank"] = lambda folder: job(
        worker, items, folder, batches[-1], "accelerate"
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    made: dict[str, dict[str, bytes]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as place:
                seconds[name].append(way(Path(place)))
                made[name] = pictures(Path(place)) if name != "loop" else {}
    whole = made[f"local, batch {batches[0] or 'auto'}"]
    base = statistics.median(seconds["loop"])
    return [
        {
            "way": name,
            "items_a_second": len(items) / statistics.median(taken),
            "over_loop": base / statistics.median(taken),
            "seconds": taken,
            "bit_equal": name == "loop" or made[name] == whole,
        }
        for name, taken in seconds.items()
    ]


def cluster(worker: ImageWorker, items: Sequence[Item], batch: int, rounds: int) -> dict[str, Any]:
    """One Ray actor against the local engine, by the seconds that more items cost, in turns."""

    def more(engine: str) -> float:
        taken = []
        for some in (items[:1], items):
            with tempfile.TemporaryDirectory() as place:
                taken.append(job(worker, some, Path(place), batch, engine))
        return taken[1] - taken[0]

    more("ray")  # starts the cluster
    pairs = [(more("ray"), more("local")) for _ in range(rounds)]
    ray, local = ([pair[i] for pair in pairs] for i in (0, 1))
    over = statistics.median(ray) / statistics.median(local)
    return {"way": "ray, one actor", "over_local": over, "seconds": ray, "local_seconds": local}


def main(
    model: str = "pocket/llamagen",
    method: str = "speculative",
    items: int = 48,
    rounds: int = 5,
    batches: str = "1,4,16,0",
    ray: Annotated[bool, typer.Option("--ray", help="Measure a Ray actor, too.")] = False,
    out: File = None,
) -> None:
    """Measure pictures as jobs, and on Ray where that is chosen."""
    worker = ImageWorker(Spec(model, method, dtype="float32"))
    some = items_of(items, worker.pipe.transformer.config.num_classes)
    loop(worker, some[:2], Path(tempfile.mkdtemp()))  # warm
    rows = measure(worker, some, rounds, [int(b) for b in batches.split(",")])
    rows += [cluster(worker, some, 16, rounds)] if ray else []
    show({"model": model, "method": method, "environment": environment(), "rows": rows}, out)


if __name__ == "__main__":
    typer.run(main)
