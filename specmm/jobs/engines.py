"""Engines that run a job: this process, one of many processes started by a launcher, or actors of a
Ray cluster (:mod:`.cluster`).

Processes share only the output folder, so none waits for another and any may die; the last one to
finish writes the whole index.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specmm.extending.registry import unknown
from specmm.jobs.finish import finish
from specmm.jobs.folder import Job, occupied, prepare, remove_parts
from specmm.jobs.items import Item
from specmm.jobs.making import Opener, making
from specmm.jobs.programs import Programs, check_compiled_kinds
from specmm.jobs.progress import Metrics, Progress
from specmm.jobs.run import Here, Loop, pending
from specmm.jobs.verify import outcome_of_repair, to_repair
from specmm.jobs.workers import ImageWorker, Worker, kind_of_work
from specmm.loading.extras import needed
from specmm.zoo.model_files import files_of_models

ENGINES = ("local", "accelerate", "ray")


def open_worker(job: Job) -> Worker:
    """The worker of the job's model; raises ``ValueError`` where its kinds of items do not fit."""
    check_compiled_kinds(job.spec.compiled, job.kinds)
    kind = kind_of_work(job.spec.model, job.kinds)
    if kind == "images":
        return ImageWorker(job.spec, job.limits.device, programs=Programs(job))
    from specmm.jobs.answers import AnswerWorker  # imports transformers

    return AnswerWorker(job.spec, kind == "questions", job.limits.device)


def run_job(
    job: Job,
    items: Sequence[Item],
    engine: str = "local",
    parquet: bool = False,
    retry_failed: bool = False,
    repair: bool = False,
    metrics: Metrics | None = None,
    opener: Opener = open_worker,
) -> tuple[dict[str, Any], Progress]:
    """The whole job: the summary of all that is done so far, and what this process did of it.

    ``opener`` opens the worker of a job. Raises ``ValueError`` for what does not fit the job in the
    folder, and where another process works there.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    rank, mine = "", items
    if engine == "accelerate":
        number, count = _rank()
        rank, mine = f"rank-{number:05d}", mine[number::count]  # done or not: always the same
        job = replace(job, limits=replace(job.limits, device=_own_device(job.limits.device)))
    prepare(job.folder, job.spec, files_of_models(job.spec.models), len(items))
    # look for remaining items only once no other process works on them, or both would make them
    with occupied(job.journals, rank):
        if not rank:
            remove_parts(job.folder)
        damaged = to_repair(job.folder, mine) if repair else {}
        left = pending(job.folder, mine, retry_failed, damaged)
        if job.spec.compiled:
            job = replace(job, left=Counter(item.method for item in left))
        with Progress(len(mine), len(mine) - len(left), metrics) as progress:
            if left and engine == "ray":
                with needed("engine ray", "ray"):
                    from specmm.jobs.cluster import run_ray
                run_ray(job, left, opener, progress)
            elif left:
                with making(job, opener, rank or "local") as maker:
                    crew = Here(maker, progress)
                    Loop(job, crew, maker.journal, progress, maker.worker.key).run(left)
        summary = finish(job.folder, job.spec, items, job.limits.shard, parquet)
    if repair:
        summary |= outcome_of_repair(job.folder, damaged)
    return summary, progress


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


def _own_device(device: str) -> str:
    """The device of this process: its own GPU or the CPU, or where asked."""
    on_gpu = torch.cuda.is_available() and device in ("auto", "cuda")
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else device
