"""The loop of a job, which hands items to makers.

A batch that fails, or whose maker dies, is halved until the item at fault is alone. That item is
tried again, on another node if there is one, and set aside if it fails too often.
"""

from __future__ import annotations

import logging
import statistics
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from specmm.jobs.folder import JOURNALS, Job
from specmm.jobs.items import Item, Some
from specmm.jobs.journal import Journal, Ledger, failure, outcomes
from specmm.jobs.making import Fault, Made, Maker, full_disk_explained
from specmm.jobs.progress import Progress
from specmm.runs.run import moving

log = logging.getLogger(__name__)
MOST_SAID = 1000  # characters of what is wrong with an item
AHEAD = 4096  # items among which those of one batch are found
SLOW = 0.5  # the share of the usual rate below which a member is reported


def pending(
    folder: Path, items: Sequence[Item], retry_failed: bool = False, damaged: Collection[str] = ()
) -> Sequence[Item]:
    """The items to run: items neither done nor set aside, items set aside that have changed since
    (with ``retry_failed`` all set aside), and items with ids in ``damaged``.

    Raises ``ValueError`` for an item that is done and has changed since.
    """
    # A digest differs for every id, too. The heads of records alone are read here, and no ledger is
    # made of them: a million take seconds.
    done, failed = set[int](), set[int]()  # digests as numbers: half the memory of text
    for outcome in outcomes(folder / JOURNALS):
        (done if outcome.done else failed).add(int(outcome.item or "0", 16))
    if not done and not failed:
        return items
    left, undone = array("I"), array("I")
    for number, item in enumerate(items):
        digest = int(item.digest, 16)
        if digest not in done:
            undone.append(number)
        if item.id in damaged or (digest not in done and (retry_failed or digest not in failed)):
            left.append(number)
    if len(items) - len(undone) < len(done):  # others are done, or these with other fields
        known = Ledger(folder / JOURNALS)
        for item in Some(items, undone):
            if known.is_done(item.id):
                raise ValueError(
                    f"item {item.id!r} is done but has changed in the job file; "
                    "give it a new id or choose another --out"
                )
    return Some(items, left)


@dataclass(eq=False)
class Member:
    """A maker of items on a ``node``, with a journal ``name``: this process, or an ``actor``.

    ``wanted`` items are given to it at a time; it has ``items`` now, which are ``suspect`` if they
    failed before.
    """

    node: Any
    name: str
    wanted: int
    actor: Any = None
    items: list[Item] = field(default_factory=list)
    suspect: bool = False
    busy: float = 0.0  # seconds
    made: int = 0


class Crew(Protocol):
    """The makers of a job's items."""

    @property
    def members(self) -> Sequence[Member]:
        """All members, idle or not."""

    def free(self, left: int) -> Sequence[Member]:
        """The members that wait for items. The crew may have grown, since at least ``left`` batches
        remain.
        """

    def begin(self, member: Member) -> None:
        """Have a member make its items."""

    def ended(self) -> Sequence[tuple[Member, Made]]:
        """The outcomes of members' items since the last call, which waits a while for one."""


class Here:
    """The crew that is this process."""

    def __init__(self, maker: Maker, progress: Progress) -> None:
        self.maker = maker
        self.bar = progress.bar
        self.members = [Member("", "", maker.sizer.size)]
        self.made: list[tuple[Member, Made]] = []

    def free(self, left: int) -> Sequence[Member]:
        return self.members

    def begin(self, member: Member) -> None:
        with moving(self.bar):
            self.made.append((member, self.maker.make(member.items)))

    def ended(self) -> Sequence[tuple[Member, Made]]:
        made, self.made = self.made, []
        return made


@dataclass
class Loop:
    """Hands items to a ``crew``, items of one ``key`` together; items set aside are recorded in
    ``journal``.
    """

    job: Job
    crew: Crew
    journal: Journal
    progress: Progress
    key: Callable[[Item], Hashable]
    unread: Iterator[Item] = field(default_factory=lambda: iter(()))
    left: int = 0  # unread ones
    waiting: deque[Item] = field(default_factory=deque)
    suspects: deque[list[Item]] = field(default_factory=deque)
    tried: dict[str, list[Hashable]] = field(default_factory=dict)  # nodes of lone failures
    busy: int = 0  # members that make items

    def run(self, items: Sequence[Item]) -> None:
        """Have ``items`` made; those that fail are set aside."""
        self.unread, self.left = iter(items), len(items)
        try:
            while self.left or self.waiting or self.suspects or self.busy:
                left = self.left + len(self.waiting) + len(self.suspects)
                for member in self.crew.free(left):
                    self._give(member)
                    if member.items:
                        self.busy += 1
                        self.crew.begin(member)
                for member, made in self.crew.ended():
                    self.busy -= 1
                    self._take(member, made)
        except KeyboardInterrupt:
            self.progress.interrupted = True

    def _read(self) -> None:
        """Read the next items, those of one key together."""
        groups: dict[Hashable, list[Item]] = {}
        for item in islice(self.unread, AHEAD):
            groups.setdefault(self.key(item), []).append(item)
            self.left -= 1
        self.waiting.extend(chain.from_iterable(groups.values()))

    def _give(self, member: Member) -> None:
        """Give ``member`` items, none if there are none for it."""
        if len(self.waiting) < member.wanted:
            self._read()
        for items in self.suspects:
            nodes = self._tried(items)
            # an item that failed alone is tried later, on another node if there is one
            if not nodes or not (self.waiting or (member.node in nodes and self._elsewhere(nodes))):
                self.suspects.remove(items)
                member.items, member.suspect = items, True
                return
        member.items, member.suspect = [], False
        # the last ones end together
        share = -(-(self.left + len(self.waiting)) // len(self.crew.members))
        while self.waiting and len(member.items) < min(member.wanted, share):
            if member.items and self.key(self.waiting[0]) != self.key(member.items[0]):
                break
            member.items.append(self.waiting.popleft())

    def _tried(self, items: Sequence[Item]) -> list[Hashable]:
        """The nodes where the item of ``items``, alone, failed."""
        return self.tried.get(items[0].id, []) if len(items) == 1 else []

    def _elsewhere(self, nodes: Sequence[Hashable]) -> bool:
        """Whether there is a member on another node."""
        return any(member.node not in nodes for member in self.crew.members)

    def _take(self, member: Member, made: Made) -> None:
        """Count the outcome of a member's items."""
        member.wanted = made.wanted or member.wanted
        member.busy += made.seconds
        member.made += len(made.done)
        self.progress.observe(len(made.done), [], made.seconds, self._slow())
        self.waiting.extendleft(reversed(made.again))
        for fault in reversed(made.faults):  # halves come in front
            self._failed(member.node, fault)

    def _failed(self, node: Hashable, fault: Fault) -> None:
        """Halve the items at fault; a single item is tried again later, or set aside."""
        items = fault.items
        if len(items) > 1:
            middle = len(items) // 2
            self.suspects.extendleft([items[middle:], items[:middle]])
            return
        nodes = self.tried.setdefault(items[0].id, [])
        nodes.append(node)
        enough = len(nodes) > self.job.limits.retries
        if fault.certain or (enough and (len(set(nodes)) > 1 or not self._elsewhere(nodes))):
            self._set_aside(items[0], fault.reason, len(nodes))
        else:
            self.suspects.append(items)

    def _set_aside(self, item: Item, reason: str, tries: int) -> None:
        text = reason if len(reason) <= MOST_SAID else f"{reason[:MOST_SAID]}…"
        log.warning("item %s is set aside: %s", item.id, text)
        with full_disk_explained(self.job):
            self.journal.append([failure(item, text, tries)])
        self.progress.observe(0, [item.id], 0.0)

    def _slow(self) -> str:
        """The node of a member that is much slower than the others, "" if there is none."""
        rates = {each: each.made / each.busy for each in self.crew.members if each.busy}
        usual = statistics.median(rates.values()) if rates else 0.0
        slowest = min(rates, key=rates.__getitem__, default=None)
        return str(slowest.node) if slowest and rates[slowest] < SLOW * usual else ""
