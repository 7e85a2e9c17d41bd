"""Kill -9 at random moments: ``python -m benchmarks.soak.kills --kills 60``.

A parent loads a tiny random model once and forks; each child works on the same job and is killed
after a random delay. When the job is finished every item must be done exactly once, with the bytes
of an undisturbed run. Jobs are started until there were enough kills.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from benchmarks.common import File, load_pipeline, show
from specmm.jobs.answers import AnswerWorker
from specmm.jobs.engines import run_job
from specmm.jobs.folder import ARCHIVES, RESULTS, Job, Limits, Spec
from specmm.jobs.items import Item, seed_of
from specmm.jobs.verify import verify
from specmm.jobs.workers import ImageWorker

Worker = ImageWorker | AnswerWorker


def items_of(count: int) -> list[Item]:
    return [Item(f"set/{i}", "class", str(i % 5), seed_of(f"set/{i}", 0)) for i in range(count)]


def go(folder: Path, worker: Worker, items: Sequence[Item]) -> None:
    """The whole job, as the command runs it."""
    run_job(Job(folder, worker.spec, Limits(batch=2, shard=4)), items, opener=lambda *_: worker)


def struck(work: Callable[[], None], delay: float) -> bool:
    """Do ``work`` in a child and kill it after ``delay`` seconds; False when it finished before.

    Raises ChildProcessError when the work itself failed: its traceback is on stderr.
    """

    def alone() -> None:
        tqdm.set_lock(RLock())  # all forks share tqdm's own, which would die with one that holds it
        work()

    child = multiprocessing.get_context("fork").Process(target=alone)
    child.start()
    time.sleep(delay)
    child.kill()
    child.join()
    if child.exitcode not in (0, -signal.SIGKILL):
        raise ChildProcessError(
            f"the job ended with exit status {child.exitcode}, its own and no kill's"
        )
    return child.exitcode != 0


def contents(folder: Path) -> dict[str, bytes]:
    files = [*(folder / RESULTS).rglob("*.*"), *(folder / ARCHIVES).glob("*.*")]
    return {f.name: f.read_bytes() for f in files}


def trial(
    worker: Worker, items: Sequence[Item], longest: float, wanted: dict[str, bytes], rng: Any
) -> int:
    """Kill a fresh job until it is finished; returns the number of kills, raises for lost items."""
    folder = Path(tempfile.mkdtemp())
    kills = 0
    while struck(lambda: go(folder, worker, items), rng.uniform(0, longest)):
        kills += 1
    found = verify(folder, items)
    if (found.done, found.left, found.failed, found.problems) != (len(items), 0, 0, []):
        raise AssertionError(f"after {kills} kills: {found}")
    if contents(folder) != wanted:
        raise AssertionError(f"after {kills} kills the output differs from an undisturbed run's")
    index = [json.loads(line)["id"] for line in (folder / "index.jsonl").read_text().splitlines()]
    if index != [item.id for item in items]:
        raise AssertionError(f"after {kills} kills the index holds {index}")
    shutil.rmtree(folder)
    return kills


def campaign(worker: Worker, kills: int, items: Sequence[Item], seed: int = 0) -> dict[str, Any]:
    """Trials over jobs of ``items`` until there were ``kills`` kills."""
    with one_thread():
        return _campaign(worker, kills, items, seed)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: a forked process has no thread pool, its parent must round alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _campaign(worker: Worker, kills: int, items: Sequence[Item], seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    whole = Path(tempfile.mkdtemp())
    begin = time.perf_counter()
    go(whole, worker, items)
    seconds = time.perf_counter() - begin
    done = 0
    trials = 0
    while done < kills:
        done += trial(worker, items, seconds * 1.2, contents(whole), rng)
        trials += 1
    shutil.rmtree(whole)
    return {
        "kills": done,
        "jobs": trials,
        "items_a_job": len(items),
        "lost": 0,
        "doubled": 0,
        "torn": 0,
        "seed": seed,
    }


def main(
    model: Annotated[str, typer.Option(help="Folder of an image model, the smaller the better.")],
    kills: int = 60,
    items: int = 8,
    seed: int = 0,
    layout: str = "folders",
    out: File = None,
) -> None:
    """Run jobs until so many were killed; the first whose results differ ends it."""
    worker = ImageWorker(Spec(model, "ar", layout=layout), pipe=load_pipeline(model))
    show(campaign(worker, kills, items_of(items), seed) | {"layout": layout}, out)


if __name__ == "__main__":
    typer.run(main)
