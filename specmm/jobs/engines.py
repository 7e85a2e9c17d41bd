"""Engines that run a job: this process, one of many processes started by a launcher, or actors of a
Ray cluster (:mod:`.cluster`).

Processes share only the output folder, so none waits for another and any may die; the last one to
finish writes the whole index.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from specmm.extending.registry import unknown
from specmm.jobs.finish import finish
from specmm.jobs.folder import Job, Ledger, occupied, prepare, remove_parts
from specmm.jobs.items import Item
from specmm.jobs.programs import Programs, check_compiled_items
from specmm.jobs.results import sums_of
from specmm.jobs.run import Bar, JobCounts, Metrics, Opener, pending, work
from specmm.jobs.verify import damage, exchanged, unpack_torn
from specmm.jobs.workers import ImageWorker, Worker, kind_of_items
from specmm.loading.extras import install
from specmm.zoo.model_files import files_of_models


def run_job(
    job: Job,
    items: Sequence[Item],
    engine: str = "local",
    parquet: bool = False,
    retry_failed: bool = False,
    repair: bool = False,
    metrics: Metrics | None = None,
    opener: Opener | None = None,
) -> tuple[dict[str, Any], JobCounts]:
    """The whole job: the summary of all that is done so far, and what this process did of it.

    ``opener`` opens the worker, without one ``open_worker`` does. Raises ``ValueError`` for what
    does not fit the job in the folder, and where another process works there.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    shared = engine == "accelerate"
    mine = share(items) if shared else list(items)
    prepare(job.folder, job.spec, files_of_models(job.spec.models))
    Programs(job).count(len(items))
    # look for remaining items only once no other process works on them, or both would make them
    with occupied(job.journals, shared):
        if not shared:
            remove_parts(job.folder)
        if repair:
            unpack_torn(job.folder)
        damaged = damage(job.folder) if repair else {}
        before = {}
        if damaged:
            known = Ledger(job.journals)
            before = {identity: known[identity] for identity in damaged}
        for item in mine:
            if item.id in damaged and (problem := exchanged(item, before[item.id])):
                raise ValueError(
                    f"item {item.id!r} cannot be made again: {problem}; put the file back, or give "
                    "the item a new id"
                )
        left = pending(job.folder, mine, retry_failed, damaged)
        begin = time.perf_counter()
        with Bar(len(mine), len(mine) - len(left), metrics) as bar:
            counts = ENGINES[engine](job, left, bar, opener)
        counts.seconds = time.perf_counter() - begin
        if metrics is not None:
            metrics.close()
        summary = finish(job.folder, job.spec, items, job.limits.shard, parquet)
    if repair:
        now = Ledger(job.journals)
        again = [item.id for item in mine if item.id in damaged]
        other = [i for i in again if sums_of(now[i]) != sums_of(before[i])]
        summary |= {"repaired": len(again), "repaired_otherwise": len(other)}
    return summary, counts


def open_worker(
    job: Job,
    items: Sequence[Item],
    device: str = "auto",
    left: Mapping[str | None, int] | None = None,
) -> Worker:
    """The worker of the job's model for ``items``; raises ``ValueError`` where they do not fit.

    ``left`` are how many it will make by method, None: ``items`` are all.
    """
    check_compiled_items(job.spec.compiled, items)
    kind = kind_of_items(job.spec.model, items)
    if kind == "images":
        made = Counter(item.method for item in items) if left is None else left
        return ImageWorker(job.spec, device, programs=Programs(job), left=made)
    from specmm.jobs.answers import AnswerWorker  # which imports transformers

    return AnswerWorker(job.spec, kind == "questions", device)


def run_local(
    job: Job, items: Sequence[Item], bar: Bar | None = None, opener: Opener | None = None
) -> JobCounts:
    """Make ``items`` here; raises ``ValueError`` when another process does."""
    opener = opener or partial(open_worker, job, items, job.limits.device)
    return work(job, items, opener, "local", bar)


def run_rank(
    job: Job, items: Sequence[Item], bar: Bar | None = None, opener: Opener | None = None
) -> JobCounts:
    """Make ``items``, this rank's (see ``share``), on its own GPU or the CPU, or where asked."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = job.limits.device
    if torch.cuda.is_available() and device in ("auto", "cuda"):
        device = f"cuda:{local}"
    opener = opener or partial(open_worker, job, items, device)
    return work(job, items, opener, f"rank-{_rank()[0]:05d}", bar)


def _rank() -> tuple[int, int]:
    """This process's number and how many there are, as ``accelerate launch`` and ``torchrun`` say.

    Raises ``ValueError`` where neither started it.
    """
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ValueError(
            "engine accelerate must be started by torchrun --no-python specmm batch … (or "
            "accelerate launch), got no RANK and WORLD_SIZE; do that, or use --engine local"
        ) from None


def share(items: Sequence[Item]) -> list[Item]:
    """This rank's part of all items of the job, done or not: always the same."""
    number, count = _rank()
    return list(items[number::count])


def run_cluster(
    job: Job, items: Sequence[Item], bar: Bar | None = None, opener: Opener | None = None
) -> JobCounts:
    """Make ``items`` with the actors of a Ray cluster, see :mod:`specmm.jobs.cluster`; raises
    ``ValueError`` without ray.
    """
    try:
        from specmm.jobs.cluster import run_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError(f"engine ray needs ray, run: {install('ray')}") from error

    def of(some: Sequence[Item], share: Mapping[str | None, int]) -> Opener:
        return opener or partial(open_worker, job, some, job.limits.device, share)

    return run_ray(job, items, of, bar)


ENGINES = {"local": run_local, "accelerate": run_rank, "ray": run_cluster}
