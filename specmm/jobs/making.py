"""One process that makes items: its worker, its journal, its batches, which grow while that pays.

An item is done when the journal says so, and the journal says so only after the item's file is
written. Items that a killed process left undone are made again under the same names, with the same
bytes on a CPU in float32: exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from specmm.jobs.folder import Job
from specmm.jobs.items import Item
from specmm.jobs.journal import Journal, Ledger
from specmm.jobs.programs import one_number_of_threads
from specmm.jobs.results import save
from specmm.jobs.workers import Worker
from specmm.loading.files import sentence_of
from specmm.loading.hardware import out_of_memory

log = logging.getLogger(__name__)
FIRST = 4  # items at a time
MOST = 256
GAIN = 1.05  # a doubled batch must make this much more a second to be worth its latency
Opener = Callable[[Job], Worker]


@dataclass
class Fault:
    """Why ``items`` were not made: one of them is at fault, or another try may succeed.

    ``certain``: no other try will.
    """

    items: list[Item]
    reason: str
    certain: bool = False


@dataclass
class Made:
    """The outcome of a batch: ids of items that are ``done``, and faults of others.

    ``again`` are items that were not tried; ``wanted`` is the number to give next.
    """

    done: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    again: list[Item] = field(default_factory=list)
    seconds: float = 0.0
    wanted: int = 0


class Maker:
    """Makes items with one pipeline and one journal."""

    def __init__(self, job: Job, worker: Worker, name: str) -> None:
        self.job = job
        self.worker = worker
        self.journal = Journal(job.journals, name)
        self.sizer = BatchSizer(job.limits.batch)

    def make(self, items: Sequence[Item]) -> Made:
        """Make ``items``.

        Raises ``ValueError`` when results cannot be written; all that was done is kept.
        """
        outcome = Made()
        groups: dict[Hashable, list[Item]] = {}
        for item in items:
            try:
                self.worker.check(item)
            except ValueError as error:
                outcome.faults.append(Fault([item], sentence_of(error), certain=True))
            else:
                groups.setdefault(self.worker.key(item), []).append(item)
        for group in groups.values():
            self._make(group, outcome)
        return outcome

    def _make(self, batch: list[Item], made: Made) -> None:
        rows = min(self.sizer.size, len(batch))
        start = time.perf_counter()
        try:
            results = self.worker.run(batch, rows)
        except Exception as error:  # whatever a model does with an item, the others go on
            if out_of_memory(error) and len(batch) > 1:
                self.sizer.shrink(rows)
                size = made.wanted = self.sizer.size
                log.warning("memory ran out at %d items, going on with %d at a time", rows, size)
            certain = isinstance(error, ValueError | FileNotFoundError)
            made.faults.append(Fault(batch, sentence_of(error), certain))
            return
        seconds = time.perf_counter() - start
        with full_disk_explained(self.job):
            self.journal.append(save(self.job.folder, results, self.job.spec.format))
        self.sizer.observe(len(batch), seconds)
        made.done += [item.id for item in batch]
        made.seconds += seconds
        made.wanted = self.sizer.size * self.worker.turns(batch[0])


class BatchSizer:
    """The next batch's ``size``: ``fixed``, or doubled from ``FIRST`` to ``MOST`` while that pays,
    until memory runs out.
    """

    def __init__(self, fixed: int = 0) -> None:
        self.size = fixed or FIRST
        self.settled = bool(fixed)
        self.rate: float | None = None  # items a second of the size before

    def observe(self, items: int, seconds: float) -> None:
        """A batch of ``items`` took ``seconds``.

        The first one, which loads and compiles, does not count.
        """
        if self.settled or items < self.size:
            return
        if self.rate is None:
            self.rate = 0.0
            return
        rate = items / max(seconds, 1e-9)
        if rate < self.rate * GAIN:
            self.size = max(self.size // 2, 1)
            self.settled = True
        elif self.size * 2 > MOST:
            self.settled = True
        else:
            self.rate = rate
            self.size *= 2

    def shrink(self, items: int) -> None:
        """Memory ran out at ``items``: from now on at most half as many."""
        self.size = max(items // 2, 1)
        self.settled = True


@contextmanager
def making(job: Job, opener: Opener, name: str) -> Iterator[Maker]:
    """Context with a maker of the ``job``, with its number of threads and a journal ``name``."""
    worker = opener(job)
    with one_number_of_threads(job.folder, worker.network):
        yield Maker(job, worker, name)


@contextmanager
def full_disk_explained(job: Job) -> Iterator[None]:
    """Context in which an ``OSError`` becomes a ``ValueError`` that says what is kept."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"writing to {job.folder} failed ({error.strerror or error}); "
            f"{Ledger(job.journals).count_done()} items are done and kept, make room and run the "
            "same command again"
        ) from error
