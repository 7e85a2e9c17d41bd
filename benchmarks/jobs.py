"""What a batch job gains and what its engines cost: ``python -m benchmarks.jobs --ray --answers``.

Throughput of ``specmm batch`` against a plain loop of ``pipe()`` at batch 1 (bar: 2x) and of one
rank under a launcher's environment (bar: 1.05 of the local engine), interleaved, in one process.
With ``--ray`` also of one actor (bar: 1.15): the seconds of all items less those of one, since an
actor loads the model itself. Every picture is compared: all must be bit-equal. With ``--answers``
also of questions about pictures whose answers have one word or forty: in batches that wait for
their longest answer, and with continuous batching.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import EMOJI, File, environment, show
from benchmarks.vlm_speed import ask
from recipes.scenes.stream import load_world
from specmm.jobs.answers import AnswerWorker
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


class Waiting(AnswerWorker):
    """Answers in batches that end with their longest."""

    def turns(self, item: Item) -> int:
        """One batch at a time."""
        return 1


def questions(count: int, folder: Path) -> list[Item]:
    """Every other one asks for a description of a held-out scene."""
    world = load_world(EMOJI, "test")
    items = list[Item]()
    for number in range(count):
        asked = ask(world, "describe" if number % 2 else "short", 1, number)
        shown = asked.pictures[0]
        assert shown is not None
        shown.save(folder / f"{number}.png")
        identity = f"bench/{number}"
        seed = seed_of(identity, 0)
        items.append(
            Item(
                identity,
                "question",
                asked.questions[0],
                seed,
                (f"{number}.png",),
                folder=str(folder),
            )
        )
    return items


def answers(method: str, count: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a job of ``count`` questions, with waiting batches and continuous batching."""
    spec = Spec("pocket/llava", method, sampling={"max_new_tokens": 64}, dtype="float32")
    ways = {
        "waiting": Waiting(spec, questions=True),
        "continuous": AnswerWorker(spec, questions=True),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        items = questions(count, Path(place))
        for turn in range(rounds + 1):
            for way, worker in ways.items():
                folder = Path(place) / f"{way}-{turn}"
                taken = job(worker, items, folder, batch)
                seconds[way] += [taken] if turn else []  # the first warms up
                index = map(json.loads, (folder / "index.jsonl").read_text().splitlines())
                found[way] = {row["id"]: row["answer"] for row in index}
    base = statistics.median(seconds["waiting"])
    return [
        {
            "way": f"answers by {method}, batch {batch}, {way}",
            "items_a_second": count / statistics.median(taken),
            "over_waiting": base / statistics.median(taken),
            "seconds": taken,
            "equal": found[way] == found["waiting"],
        }
        for way, taken in seconds.items()
    ]


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
    asking: Annotated[
        bool, typer.Option("--answers", help="Measure answers about pictures, too.")
    ] = False,
    out: File = None,
) -> None:
    """Measure pictures as jobs, and what else is chosen."""
    worker = ImageWorker(Spec(model, method, dtype="float32"))
    some = items_of(items, worker.pipe.transformer.config.num_classes)
    loop(worker, some[:2], Path(tempfile.mkdtemp()))  # warm
    rows = measure(worker, some, rounds, [int(b) for b in batches.split(",")])
    rows += [cluster(worker, some, 16, rounds)] if ray else []
    for way in ("ar", "msd") if asking else ():
        rows += answers(way, 48, 8, rounds)
    show({"model": model, "method": method, "environment": environment(), "rows": rows}, out)


if __name__ == "__main__":
    typer.run(main)
