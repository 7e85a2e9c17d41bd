"""Engines that run a job: this process, one of many processes started by a launcher, or actors of a
Ray cluster.

Processes share only the output folder, so none waits for another and any may die; the last one to
finish writes the whole index. If a Ray actor dies, its batch is halved and given to others; an item
that repeatedly kills its actor is set aside.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specmm.extending.registry import unknown
from specmm.jobs.finish import finish
from specmm.jobs.folder import Job, Journal, Ledger, failure, occupied, prepare, remove_parts
from specmm.jobs.items import Item
from specmm.jobs.programs import Programs, check_compiled_items
from specmm.jobs.results import sums_of
from specmm.jobs.run import Bar, JobCounts, Metrics, Opener, pending, work
from specmm.jobs.verify import damage, exchanged, unpack_torn
from specmm.jobs.workers import ImageWorker, Worker, kind_of_items
from specmm.loading.extras import install
from specmm.zoo.model_files import files_of_models

log = logging.getLogger(__name__)
LOCAL = "127.0.0.1"
ANSWER = 5.0  # seconds in which a cluster must answer
CHUNK = 32  # items an actor is given at a time, which it makes in batches


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


# ---- Ray


class Actor:
    """One worker of the cluster; it loads the model when the first items come."""

    def __init__(
        self, job: Job, opener: Opener | None, threads: int, share: Mapping[str | None, int]
    ) -> None:
        self.job = job
        self.share = share  # of all items, by method
        self.opener = opener
        self.name = f"ray-{uuid.uuid4().hex[:12]}"
        self.worker: Worker | None = None
        torch.set_num_threads(min(threads, os.cpu_count() or 1))  # Ray sets it to one

    def make(self, items: list[Item]) -> tuple[list[str], list[str]]:
        """Ids done and set aside."""
        job = self.job
        opener = self.opener or partial(open_worker, job, items, job.limits.device, left=self.share)
        worker = self.worker = self.worker or opener()
        counts = work(job, items, lambda: worker, self.name)
        return counts.done, counts.failed


def run_ray(
    job: Job, items: Sequence[Item], bar: Bar | None = None, opener: Opener | None = None
) -> JobCounts:
    """Make ``items`` with the actors of a Ray cluster; raises ``ValueError`` without ray."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(f"engine ray needs ray, run: {install('ray')}") from error
    if not ray.is_initialized():
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    job = replace(job, folder=job.folder.absolute())
    gpus = int(ray.cluster_resources().get("GPU", 0))
    cores = int(ray.cluster_resources().get("CPU", 0))
    if not cores:
        raise ValueError(
            "the Ray cluster must have a node with a CPU for workers, got none; start one (ray "
            "start --address …) and run the same command again"
        )
    fit = gpus or cores  # others would wait for ever, and their items with them
    if job.limits.actors > fit:
        log.warning("%d workers fit into the cluster, not %d", fit, job.limits.actors)
    count = min(job.limits.actors or fit, fit, max(len(items), 1))
    kind: Any = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(Actor)
    left = Counter(item.method for item in items)
    share = {method: each // count for method, each in left.items()}
    start = partial(kind.remote, job, opener, max(1, cores // count), share)
    return _Pool(job, start, count, bar).run(items)


def _check_address(address: str) -> None:
    """Raise ``ValueError`` for a cluster's ``address`` where nothing answers; Ray would wait for a
    minute and a half and warn.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host or LOCAL, int(port)), timeout=ANSWER).close()
    except OSError as error:
        raise ValueError(
            f"RAY_ADDRESS must be a cluster's, got {address}, where nothing answers ({error}); "
            "start a node there, or unset it to use this machine"
        ) from None


ENGINES = {"local": run_local, "accelerate": run_rank, "ray": run_ray}


class _Pool:
    """Hands items to actors and replaces those that die."""

    def __init__(self, job: Job, start: Callable[[], Any], count: int, bar: Bar | None) -> None:
        self.job = job
        self.start = start
        self.count = count
        self.bar = bar
        self.busy: dict[Any, tuple[Any, list[Item]]] = {}  # a call's reference: its actor and items
        self.deaths: dict[str, int] = {}
        self.counts = JobCounts()
        self.waiting: deque[list[Item]] = deque()
        self.journal = Journal(job.journals, "ray-driver")

    def run(self, items: Sequence[Item]) -> JobCounts:
        import ray

        chunk = max(1, min(CHUNK, -(-len(items) // self.count)))
        self.waiting += [list(items[i : i + chunk]) for i in range(0, len(items), chunk)]
        idle = [self.start() for _ in range(min(self.count, len(self.waiting)))]
        try:
            while self.waiting or self.busy:
                while self.waiting and idle:
                    actor = idle.pop()
                    batch = self.waiting.popleft()
                    self.busy[actor.make.remote(batch)] = actor, batch
                ready, _ = ray.wait(list(self.busy))
                for call in ready:
                    idle.append(self._take(call))
        except KeyboardInterrupt:
            self.counts.interrupted = True
        finally:
            self.journal.close()
            for actor in [*idle, *(a for a, _ in self.busy.values())]:
                ray.kill(actor)
        return self.counts

    def _take(self, call: Any) -> Any:
        """Count the results of a call; returns its actor, or a new one if that died."""
        import ray

        actor, batch = self.busy.pop(call)
        try:
            done, failed = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None
        except ray.exceptions.RayError as error:  # dead, out of memory, its node lost
            self._share_out(batch, f"its worker died: {' '.join(str(error).split())[:300]}")
            ray.kill(actor)
            return self.start()
        self.counts.done += done
        self.counts.failed += failed
        if self.bar is not None:
            self.bar.observe(len(done), len(failed), len(batch), 0.0)
        return actor

    def _share_out(self, batch: list[Item], reason: str) -> None:
        """Queue a dead actor's remaining items, in halves until the item that kills is alone."""
        left = pending(self.job.folder, batch)
        self.counts.done += [i.id for i in batch if i not in left]
        if len(left) > 1:
            middle = len(left) // 2
            self.waiting += [left[:middle], left[middle:]]
        for item in left if len(left) == 1 else []:
            deaths = self.deaths[item.id] = self.deaths.get(item.id, 0) + 1
            if deaths <= self.job.limits.retries:
                self.waiting.append([item])
            else:
                self.journal.append([failure(item, reason, deaths)])
                self.counts.failed.append(item.id)
