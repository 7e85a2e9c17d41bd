"""The loop of a job: runs the remaining items in batches, writes results, then journal lines.

An item is done when the journal says so, and the journal says so only after the item's file is
written. Items that a killed process left undone are made again under the same names, with the same
bytes on a CPU in float32: exactly once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from specmm.jobs.folder import JOURNALS, Job, Journal, Ledger, check_same, failure
from specmm.jobs.items import Item
from specmm.jobs.programs import Programs
from specmm.jobs.results import save
from specmm.jobs.workers import Worker
from specmm.loading.extras import install
from specmm.loading.files import sentence_of
from specmm.loading.hardware import out_of_memory
from specmm.runs.run import moving

log = logging.getLogger(__name__)
Opener = Callable[[], Worker]
FIRST = 4  # items at a time
MOST = 256
EVERY = 60  # seconds between two states of the bar in a log
MOST_SAID = 1000  # characters of what is wrong with an item
GAIN = 1.05  # a doubled batch must make this much more a second to be worth its latency


class Bar:
    """A progress bar over ``total`` items of which ``before`` were done earlier, and metrics.

    In a log it comes once a minute, and not at all of what takes less.
    """

    def __init__(self, total: int, before: int, metrics: Metrics | None = None) -> None:
        watched = sys.stderr.isatty()
        often = 0.1 if watched else EVERY
        self.bar = tqdm(
            total=total,
            initial=before,
            unit="item",
            smoothing=0.1,
            mininterval=often,
            maxinterval=max(often, 10),
            delay=0 if watched else EVERY,
        )
        self.failures = 0
        self.metrics = metrics

    def observe(self, done: int, failed: int, batch: int, seconds: float, slow: str = "") -> None:
        """Items done and set aside since the last call, the batch's size and its seconds, and the
        machine that is ``slow``.
        """
        self.failures += failed
        self.bar.update(done + failed)
        more = {"slow": slow} if slow else {}
        self.bar.set_postfix(batch=batch, failed=self.failures, **more, refresh=False)
        if self.metrics is not None:
            self.metrics.observe(done, failed, batch, seconds)

    def moving(self) -> AbstractContextManager[None]:
        """Context for a batch, within whose pictures the bar moves."""
        return moving(self.bar)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()


class Metrics:
    """Counters for Prometheus at http://127.0.0.1:``port``/metrics; 0 takes a free port."""

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        except ModuleNotFoundError as error:
            raise ValueError(f"metrics need prometheus_client, run: {install('batch')}") from error
        registry = CollectorRegistry()

        def counter(name: str, text: str) -> Any:
            return Counter(f"specmm_{name}", text, registry=registry)

        self.done = counter("items_done", "Items finished by this process.")
        self.failed = counter("items_failed", "Items set aside by this process.")
        self.seconds = counter("busy_seconds", "Seconds spent in the model.")
        self.batch = Gauge("specmm_batch_size", "Items of the last batch.", registry=registry)
        try:
            self.server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ValueError(
                f"metrics port {port} must be free, got: {error.strerror}; choose another"
            ) from error
        self.port = self.server.server_port

    def observe(self, done: int, failed: int, batch: int, seconds: float) -> None:
        self.done.inc(done)
        self.failed.inc(failed)
        self.seconds.inc(seconds)
        if batch:
            self.batch.set(batch)

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()


@dataclass
class JobCounts:
    """The outcome of one process: ids it finished and set aside, whether Ctrl-C ended it, the
    seconds since its start, and those of them in the model.
    """

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0
    busy: float = 0.0


def pending(
    folder: Path, items: Sequence[Item], retry_failed: bool = False, damaged: Container[str] = ()
) -> list[Item]:
    """The items to run: items neither done nor set aside, items set aside that have changed since
    (with ``retry_failed`` all set aside), and items with ids in ``damaged``.

    Raises ``ValueError`` for an item that is done and has changed since.
    """
    known = Ledger(folder / JOURNALS)
    check_same(items, known)

    def is_left(item: Item) -> bool:
        name = item.id
        if name not in known or name in damaged:
            return True
        return not known.is_done(name) and (retry_failed or known.digest(name) != item.digest)

    return [item for item in items if is_left(item)]


def work(
    job: Job, items: Sequence[Item], opener: Opener, name: str, bar: Bar | None = None
) -> JobCounts:
    """Make ``items`` in this process; see :func:`working`, which is entered if there are any."""
    if not items:
        return JobCounts()
    with working(job, opener, name, bar) as runner:
        return runner.run(items)


@contextmanager
def working(job: Job, opener: Opener, name: str, bar: Bar | None = None) -> Iterator[Runner]:
    """Context with a runner of the ``job``, with its number of threads and a journal ``name``.

    Raises ``ValueError`` when results cannot be written; all that was done is kept.
    """
    journal = Journal(job.journals, name)
    try:
        worker = opener()
        with Programs(job).one_number_of_threads(worker.network):
            yield Runner(worker, job, journal, bar)
    finally:
        journal.close()


def kept_of(job: Job) -> int:
    """How many items are done, by all processes."""
    known = Ledger(job.journals)
    return sum(known.is_done(name) for name in known)


@dataclass
class Runner:
    """Works through items with one pipeline and one journal; batches grow as long as it lives."""

    worker: Worker
    job: Job
    journal: Journal
    bar: Bar | None
    counts: JobCounts = field(default_factory=JobCounts)

    def __post_init__(self) -> None:
        self.sizer = BatchSizer(self.job.limits.batch)
        self.tries: dict[str, int] = {}
        self.wanted = 0  # items of the next batch

    def run(self, items: Sequence[Item]) -> JobCounts:
        """Make ``items``; those that fail are set aside."""
        self.counts = JobCounts()
        by_key: dict[Hashable, list[Item]] = {}
        for item in items:
            by_key.setdefault(self.worker.key(item), []).append(item)
        queue = deque(item for group in by_key.values() for item in group)
        try:
            while queue:
                if batch := self._next(queue):
                    self._attempt(batch, queue)
        except KeyboardInterrupt:
            self.counts.interrupted = True
        return self.counts

    def _next(self, queue: deque[Item]) -> list[Item]:
        """The next batch of one key; items that the model cannot make are set aside."""
        batch: list[Item] = []
        key = self.worker.key(queue[0])
        most = 1
        first = not self.wanted
        while queue and len(batch) < most and self.worker.key(queue[0]) == key:
            item = queue.popleft()
            try:
                self.worker.check(item)
            except ValueError as error:
                self._set_aside(item, error)
                continue
            batch.append(item)
            most = self.sizer.size * (
                1 if first else self.worker.turns(item)
            )  # the first come soon
        return batch

    def _attempt(self, batch: list[Item], queue: deque[Item]) -> None:
        """Make a batch; one that fails is halved until the item at fault is alone."""
        start = time.perf_counter()
        rows = min(self.sizer.size, len(batch))
        try:
            with nullcontext() if self.bar is None else self.bar.moving():
                results = self.worker.run(batch, rows)
        except Exception as error:  # whatever a model does with an item, the others go on
            if len(batch) == 1:
                self._failed(batch[0], error, queue)
                return
            if out_of_memory(error):
                self.sizer.shrink(rows)
                size = self.sizer.size
                log.warning("memory ran out at %d items, going on with %d at a time", rows, size)
            middle = len(batch) // 2
            self._attempt(batch[:middle], queue)
            self._attempt(batch[middle:], queue)
            return
        seconds = time.perf_counter() - start
        with self._full_disk_explained():
            spec = self.job.spec
            records = save(self.job.folder, results, spec.format)
            self.journal.append(records)
        self.counts.done += [item.id for item in batch]
        self.counts.busy += seconds
        self.sizer.observe(len(batch), seconds)
        self.wanted = self.sizer.size * self.worker.turns(batch[0])
        if self.bar is not None:
            self.bar.observe(len(batch), 0, rows, seconds)

    def _failed(self, item: Item, error: Exception, queue: deque[Item]) -> None:
        """Try again later, unless the item itself is at fault or was tried often enough."""
        tries = self.tries[item.id] = self.tries.get(item.id, 0) + 1
        if isinstance(error, ValueError | FileNotFoundError) or tries > self.job.limits.retries:
            self._set_aside(item, error)
        else:
            queue.append(item)

    def _set_aside(self, item: Item, error: Exception) -> None:
        text = sentence_of(error)
        text = text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}…"
        log.warning("item %s is set aside: %s", item.id, text)
        with self._full_disk_explained():
            self.journal.append([failure(item, text, self.tries.get(item.id, 1))])
        self.counts.failed.append(item.id)
        if self.bar is not None:
            self.bar.observe(0, 1, 0, 0.0)

    @contextmanager
    def _full_disk_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"writing to {self.job.folder} failed ({error.strerror or error}); "
                f"{kept_of(self.job)} items are done and kept, make room and run the same command "
                "again"
            ) from error


@dataclass
class BatchSizer:
    """The next batch's ``size``: ``fixed``, or doubled from ``FIRST`` while that pays.

    It never exceeds ``ceiling``, which halves when memory runs out.
    """

    fixed: int = 0
    size: int = 0
    ceiling: int = MOST
    rate: float = 0.0  # items a second of the size before
    settled: bool = False

    def __post_init__(self) -> None:
        self.size = self.fixed or FIRST
        self.settled = bool(self.fixed)
        self.warm = False

    def observe(self, items: int, seconds: float) -> None:
        """A batch of ``items`` took ``seconds``.

        The first one, which loads and compiles, does not count.
        """
        if self.settled or items < self.size:
            return
        if not self.warm:
            self.warm = True
            return
        rate = items / max(seconds, 1e-9)
        if rate < self.rate * GAIN:
            self.size = max(self.size // 2, 1)
            self.settled = True
        elif self.size * 2 > self.ceiling:
            self.settled = True
        else:
            self.rate = rate
            self.size *= 2

    def shrink(self, items: int) -> None:
        """Memory ran out at ``items``: from now on at most half as many."""
        self.ceiling = self.size = max(items // 2, 1)
        self.settled = True
