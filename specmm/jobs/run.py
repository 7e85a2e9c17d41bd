"""The loop of a job: batches of what is left, results on the disk, then a line in the journal.

An item is done when the journal says so, and the journal says so only after the item's file. What a
killed process left undone is made again under the same name, with the same bytes on a CPU in
float32: exactly once.

Shape letters: none.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specmm.jobs.items import Item
from specmm.jobs.journal import Journal, ledger
from specmm.jobs.spec import Limits, Spec, check_same
from specmm.jobs.store import JOURNALS, Store
from specmm.jobs.workers import Worker

log = logging.getLogger(__name__)
Opener = Callable[[], Worker]
FIRST, MOST = 4, 256  # items at a time
GAIN = 1.05  # a doubled batch must make this much more a second to be worth its latency


class Watch(Protocol):
    """Is told what happens, for progress bars and metrics."""

    def observe(self, done: int, failed: int, batch: int, seconds: float) -> None:
        """Items done and set aside since the last call, the batch's size and its seconds."""
        ...


@dataclass
class JobCounts:
    """What one process did: ids it finished and set aside now, and whether Ctrl-C ended it."""

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    interrupted: bool = False


def pending(
    folder: Path, items: Sequence[Item], retry_failed: bool = False, damaged: Container[str] = ()
) -> list[Item]:
    """The items neither done nor set aside (which ``retry_failed`` takes up again), and those of
    the ids ``damaged``.

    Raises ``ValueError`` for an item that is done and has changed since.
    """
    known = ledger(folder / JOURNALS)
    check_same(items, known)
    again = {i for i, record in known.items() if retry_failed and record["state"] == "failed"}
    return [i for i in items if i.id not in known or i.id in again or i.id in damaged]


@dataclass
class Runner:
    """Works through items with one pipeline, one store and one journal."""

    worker: Worker
    store: Store
    journal: Journal
    limits: Limits
    watch: Watch | None = None
    counts: JobCounts = field(default_factory=JobCounts)

    def __post_init__(self) -> None:
        self.sizer = BatchSizer(self.limits.batch)
        self.tries: dict[str, int] = {}

    def run(self, items: Sequence[Item]) -> JobCounts:
        """Make all of ``items``. Raises ``ValueError`` when results cannot be written; all that was
        done is kept.
        """
        queue = deque(self._possible(items))
        try:
            while queue:
                self._attempt(self._next(queue), queue)
        except KeyboardInterrupt:
            self.counts.interrupted = True
        return self.counts

    def _possible(self, items: Sequence[Item]) -> list[Item]:
        """``items`` without those the model cannot make, which are set aside; those of a key side
        by side.
        """
        found = []
        for item in items:
            try:
                self.worker.check(item)
                found.append(item)
            except ValueError as error:
                self._set_aside(item, error)
        places: dict[Any, int] = {}
        for item in found:
            places.setdefault(self.worker.key(item), len(places))
        return sorted(found, key=lambda item: places[self.worker.key(item)])

    def _next(self, queue: deque[Item]) -> list[Item]:
        batch = [queue.popleft()]
        most = self.sizer.size * self.worker.turns(batch[0])
        while (
            queue and len(batch) < most and self.worker.key(queue[0]) == self.worker.key(batch[0])
        ):
            batch.append(queue.popleft())
        return batch

    def _attempt(self, batch: list[Item], queue: deque[Item]) -> None:
        """Make a batch; one that fails is taken apart until the item at fault is alone."""
        start, rows = time.perf_counter(), min(self.sizer.size, len(batch))
        try:
            results = self.worker.run(batch, rows)
        except Exception as error:  # whatever a model does with an item, the others go on
            if len(batch) == 1:
                self._failed(batch[0], error, queue)
                return
            if out_of_memory(error):
                self.sizer.shrink(rows)
                log.warning(
                    "memory ran out at %d items, going on with %d at a time", rows, self.sizer.size
                )
            middle = len(batch) // 2
            self._attempt(batch[:middle], queue)
            self._attempt(batch[middle:], queue)
            return
        seconds = time.perf_counter() - start
        self._write(lambda: self.journal.append(self.store.save(results)))
        self.counts.done += [item.id for item in batch]
        self.sizer.observe(len(batch), seconds)
        self._tell(len(batch), 0, rows, seconds)

    def _failed(self, item: Item, error: Exception, queue: deque[Item]) -> None:
        """Try again later, unless the item itself is at fault or was tried often enough."""
        tries = self.tries[item.id] = self.tries.get(item.id, 0) + 1
        if isinstance(error, ValueError | FileNotFoundError) or tries > self.limits.retries:
            self._set_aside(item, error)
        else:
            queue.append(item)

    def _set_aside(self, item: Item, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning("item %s is set aside: %s", item.id, text)
        record = failure(item, text, self.tries.get(item.id, 1))
        self._write(lambda: self.journal.append([record]))
        self.counts.failed.append(item.id)
        self._tell(0, 1, 0, 0.0)

    def _tell(self, *facts: Any) -> None:
        if self.watch is not None:
            self.watch.observe(*facts)

    def _write(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise ValueError(
                f"writing to {self.store.folder} failed ({error.strerror or error}); {len(self.counts.done)} items done "
                "now are kept, make room and run the same command again"
            ) from error


def failure(item: Item, error: str, tries: int) -> dict[str, Any]:
    """The journal's record of an item that is set aside."""
    return {"id": item.id, "state": "failed", "item": item.digest, "error": error, "tries": tries}


def work(
    folder: Path,
    spec: Spec,
    limits: Limits,
    items: Sequence[Item],
    opener: Opener,
    journal: str,
    watch: Watch | None = None,
) -> JobCounts:
    """Make ``items`` in this process, whose journal is called ``journal``; nothing is loaded where
    nothing is left.
    """
    held = Journal(folder / JOURNALS, journal)
    try:
        if not items:
            return JobCounts()
        return Runner(opener(), Store(folder, spec.format, spec.model), held, limits, watch).run(
            items
        )
    finally:
        held.close()


@dataclass
class BatchSizer:
    """The next batch's ``size``: doubled from ``FIRST`` while that pays, or ``fixed``; never above
    ``ceiling``, which halves when memory runs out.
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
        """A batch of ``items`` took ``seconds``; the first one, which loads and compiles, does not
        count.
        """
        if self.settled or items < self.size:
            return
        if not self.warm:
            self.warm = True
            return
        rate = items / max(seconds, 1e-9)
        if rate < self.rate * GAIN:
            self.size, self.settled = max(self.size // 2, 1), True
        elif self.size * 2 > self.ceiling:
            self.settled = True
        else:
            self.rate, self.size = rate, self.size * 2

    def shrink(self, items: int) -> None:
        """Memory ran out at ``items``: from now on at most half as many."""
        self.ceiling = self.size = max(items // 2, 1)
        self.settled = True


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on the device or here."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
