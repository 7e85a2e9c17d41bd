"""``--engine ray``: actors of a Ray cluster, each with a pipeline of its own, that share the output
folder.

An actor that dies takes a batch with it; the batch is taken apart and given to others, and an item
that kills its actor again and again is set aside. Results and journals are those of the other
engines.

Shape letters: none.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specmm.jobs.engines import opener_of
from specmm.jobs.items import Item
from specmm.jobs.journal import Journal, occupied
from specmm.jobs.run import JobCounts, Opener, Watch, failure, pending, work
from specmm.jobs.spec import Limits, Spec
from specmm.jobs.store import JOURNALS
from specmm.jobs.workers import Worker

CHUNK = 32  # items an actor is given at a time, in batches of its own


class Actor:
    """One worker of the cluster; it loads the model when the first items come."""

    def __init__(
        self,
        folder: str,
        spec: Spec,
        limits: Limits,
        opener: Opener | None = None,
        threads: int = 1,
    ) -> None:
        self.folder, self.spec, self.limits = Path(folder), spec, limits
        self.opener, self.name = opener, f"ray-{uuid.uuid4().hex[:12]}"
        self.worker: Worker | None = None
        torch.set_num_threads(
            min(threads, os.cpu_count() or 1)
        )  # Ray leaves torch one, however few the actors

    def make(self, items: list[Item]) -> tuple[list[str], list[str]]:
        """Ids done and set aside."""
        worker = self.worker or (self.opener or opener_of(self.spec, items, self.limits.device))()
        self.worker = worker
        counts = work(self.folder, self.spec, self.limits, items, lambda: worker, self.name)
        return counts.done, counts.failed


def run_ray(
    folder: Path,
    spec: Spec,
    limits: Limits,
    items: Sequence[Item],
    watch: Watch | None = None,
    opener: Opener | None = None,
    actors: int = 0,
) -> JobCounts:
    """Make ``items`` with ``actors`` workers (0: one a GPU, or one a CPU core, of the cluster).

    Raises ``ValueError`` without ray and where another process works in ``folder``.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError("engine ray needs ray, run: pip install 'specmm[ray]'") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    with occupied(folder / JOURNALS, shared=False):
        gpus = int(ray.cluster_resources().get("GPU", 0))
        count = min(actors or gpus or int(ray.cluster_resources()["CPU"]), max(len(items), 1))
        threads = max(1, int(ray.cluster_resources()["CPU"]) // count)
        kind: Any = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(Actor)
        arguments = (str(folder.absolute()), spec, limits, opener, threads)
        return Pool(lambda: kind.remote(*arguments), count, folder, limits.retries, watch).run(
            items
        )


class Pool:
    """Hands items to actors and replaces those that die."""

    def __init__(
        self, start: Any, count: int, folder: Path, retries: int, watch: Watch | None
    ) -> None:
        self.start, self.count, self.folder, self.retries, self.watch = (
            start,
            count,
            folder,
            retries,
            watch,
        )
        self.busy: dict[Any, tuple[Any, list[Item]]] = {}  # a call's reference: its actor and items
        self.deaths: dict[str, int] = {}
        self.counts = JobCounts()

    def run(self, items: Sequence[Item]) -> JobCounts:
        """See :func:`run_ray`."""
        import ray

        chunk = max(1, min(CHUNK, -(-len(items) // self.count)))
        waiting = deque(list(items[i : i + chunk]) for i in range(0, len(items), chunk))
        idle = [self.start() for _ in range(min(self.count, len(waiting)))]
        journal = Journal(self.folder / JOURNALS, "ray-driver")
        try:
            while waiting or self.busy:
                while waiting and idle:
                    actor, batch = idle.pop(), waiting.popleft()
                    self.busy[actor.make.remote(batch)] = actor, batch
                ready, _ = ray.wait(list(self.busy))
                for call in ready:
                    idle.append(self._take(call, waiting, journal))
        except KeyboardInterrupt:
            self.counts.interrupted = True
        finally:
            journal.close()
            for actor in [*idle, *(a for a, _ in self.busy.values())]:
                ray.kill(actor)
        return self.counts

    def _take(self, call: Any, waiting: deque[list[Item]], journal: Journal) -> Any:
        """Count what a call did; returns its actor, or a new one for an actor that died."""
        import ray

        actor, batch = self.busy.pop(call)
        try:
            done, failed = ray.get(call)
        except ray.exceptions.RayActorError as error:
            self._survive(
                batch, f"its worker died: {' '.join(str(error).split())[:300]}", waiting, journal
            )
            return self.start()
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from None
        self.counts.done += done
        self.counts.failed += failed
        if self.watch is not None:
            self.watch.observe(len(done), len(failed), len(batch), 0.0)
        return actor

    def _survive(
        self, batch: list[Item], reason: str, waiting: deque[list[Item]], journal: Journal
    ) -> None:
        """Give what a dead actor left to others, halved until the item that kills is alone."""
        left = pending(self.folder, batch)
        self.counts.done += [i.id for i in batch if i not in left]
        if len(left) > 1:
            middle = len(left) // 2
            waiting.extend([left[:middle], left[middle:]])
        for item in left if len(left) == 1 else []:
            deaths = self.deaths[item.id] = self.deaths.get(item.id, 0) + 1
            if deaths <= self.retries:
                waiting.append([item])
            else:
                journal.append([failure(item, reason, deaths)])
                self.counts.failed.append(item.id)
