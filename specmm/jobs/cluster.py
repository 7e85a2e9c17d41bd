"""Engine ``ray``: actors on the nodes of a Ray cluster, and the pool that hands items to them.

Ray starts actors, tells of their deaths and knows the nodes. The pool decides what a death means:

- An actor gets items once it has joined: it could be scheduled, and has the driver's code. A node
  with other code, or whose results would be others, is left out.
- What a dead actor had left is handed out again in halves, until the item that kills is alone. It
  is set aside if it kills too often, on different nodes where there are several.
- A node whose actors die twice, whatever they make, is left out while others are there.
- Where memory ran out, the node has an actor less, and batches are half as large.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import statistics
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from specmm.image_ar.records import versions
from specmm.jobs.folder import Job, Journal, Ledger, failure
from specmm.jobs.items import Item
from specmm.jobs.programs import OtherPlace
from specmm.jobs.run import FIRST, Bar, JobCounts, Opener, Runner, working

log = logging.getLogger(__name__)
LOCAL = "127.0.0.1"
ANSWER = 5.0  # seconds in which a cluster must answer
LOOK = 1.0  # seconds between two looks at the nodes
DEATHS = 2  # of a node's actors one after the other, whatever they make, while others live
SLOW = 0.5  # of the usual rate of an actor is worth telling


def run_ray(
    job: Job, items: Sequence[Item], opener: Callable[..., Opener], bar: Bar | None
) -> JobCounts:
    """Make ``items`` with the actors of a Ray cluster.

    ``opener`` of an actor's first items, and of its ``share`` of all by method, gives the actor's.

    Raises ``ValueError`` where no node can make them.
    """
    if not ray.is_initialized():
        _check_address(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        except (RuntimeError, ConnectionError) as error:  # of another Python, such as
            raise ValueError(f"the Ray cluster cannot be used: {_sentence(error)}") from error
    job = replace(job, folder=job.folder.absolute())
    return _Pool(job, opener, bar).run(items)


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


def code() -> dict[str, str]:
    """What the results of a process depend on of its software, its own source among it."""
    own = hashlib.sha256()
    folder = Path(__file__).parents[1]
    files = (Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names)
    for file in sorted(file for file in files if file.suffix == ".py"):
        own.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return {**versions(), "source": own.hexdigest()[:12]}


class Actor:
    """A process of the cluster; it loads the model when the first items come.

    It works in the driver's ``folder`` where that is there, so that relative paths are the same.
    """

    def __init__(self, job: Job, name: str, opener: Callable[..., Opener], threads: int) -> None:
        self.job = job
        self.name = name
        self.opener = opener
        self.open = ExitStack()
        self.runner: Runner | None = None
        torch.set_num_threads(min(threads, os.cpu_count() or 1))  # Ray sets it to one

    def join(self, folder: str) -> dict[str, str]:
        """The code here."""
        if os.path.isdir(folder):
            os.chdir(folder)
        return code()

    def make(self, items: list[Item]) -> tuple[JobCounts, int]:
        """What became of ``items``, and how many to give next."""
        if self.runner is None:
            made = working(self.job, self.opener(items), self.name)
            self.runner = self.open.enter_context(made)
        return self.runner.run(items), self.runner.wanted


@dataclass
class _Node:
    """A machine of the cluster; ``slots`` actors have a place there."""

    identity: str
    name: str
    slots: int
    cores: int
    deaths: int = 0  # one after the other, whatever was made
    left_out: str = ""  # why


@dataclass(eq=False)
class _Member:
    """An actor of the pool, on its ``node``; ``wanted`` items are given to it at a time."""

    actor: Any
    node: _Node
    name: str
    wanted: int
    busy: float = 0.0
    made: int = 0


class _Call(NamedTuple):
    member: _Member
    batch: list[Item]  # none: it joins
    suspect: bool = False  # an actor has died of these items


@dataclass
class _Pool:
    """Hands items to actors, on nodes as they come and go."""

    job: Job
    opener: Callable[..., Opener]
    bar: Bar | None
    nodes: dict[str, _Node] = field(default_factory=dict)
    calls: dict[Any, _Call] = field(default_factory=dict)  # by Ray's references
    idle: list[_Member] = field(default_factory=list)
    waiting: deque[Item] = field(default_factory=deque)
    suspects: deque[list[Item]] = field(default_factory=deque)
    killed: dict[str, list[str]] = field(default_factory=dict)  # by an item alone: the nodes
    counts: JobCounts = field(default_factory=JobCounts)
    looked: float = 0.0
    said: set[str] = field(default_factory=set)

    def run(self, items: Sequence[Item]) -> JobCounts:
        self.code = code()
        self.most = self.job.limits.batch or FIRST  # items of an actor's first batch
        self.ceiling = len(items)
        groups: dict[tuple[Any, ...], list[Item]] = {}
        for item in items:
            groups.setdefault(_alike(item), []).append(item)
        for group in groups.values():
            self.waiting += group
        self.share = Counter(item.method for item in items)
        self.journal = Journal(self.job.journals, "ray-driver")
        try:
            while self.waiting or self.suspects or self.calls:
                self._look()
                self._start_actors()
                self._hand_out()
                if not self.calls:
                    time.sleep(LOOK)
                    continue
                for call in ray.wait(list(self.calls), timeout=LOOK)[0]:
                    self._take(call)
        except KeyboardInterrupt:
            self.counts.interrupted = True
        finally:
            self.journal.close()
            for member in self._members():
                ray.kill(member.actor)
        return self.counts

    def _members(self) -> list[_Member]:
        return [*self.idle, *(call.member for call in self.calls.values())]

    def _say(self, text: str) -> None:
        """Say it, once."""
        if text not in self.said:
            log.warning(text)
            self.said.add(text)

    # ---- nodes

    def _look(self) -> None:
        """See which nodes are there.

        Raises ``ValueError`` where all of them are left out.
        """
        if time.monotonic() - self.looked < LOOK:
            return
        self.looked = time.monotonic()
        found = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        device, asked = self.job.limits.device, self.job.limits.actors
        total = sum(int(node["Resources"].get("GPU", 0)) for node in found.values())
        on_gpus = device != "cpu" and (device.startswith("cuda") or total > 0)
        self.shares = max(1, -(-asked // max(total, 1))) if on_gpus else 0  # actors of a GPU
        for identity, node in found.items():
            cores, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
            if identity not in self.nodes:
                slots = min(gpus * self.shares, cores) if on_gpus else cores
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                self.nodes[identity] = _Node(identity, name, slots, cores)
        self.nodes = {i: node for i, node in self.nodes.items() if i in found or node.left_out}
        usable = self._usable()
        fit = sum(node.slots for node in usable)
        if usable and asked > fit:
            self._say(f"{fit} workers fit into the cluster, not {asked}")
        out = [node for node in self.nodes.values() if node.left_out and node.identity in found]
        if out and not usable:
            reasons = "; ".join(f"{node.name}: {node.left_out}" for node in out)
            raise ValueError(f"no node of the Ray cluster can make the items: {reasons}")
        if not usable:
            kind = "GPU" if on_gpus else "CPU"
            self._say(
                f"the Ray cluster has no node with a {kind} for workers, waiting until one joins "
                "(ray start --address …)"
            )

    def _usable(self) -> list[_Node]:
        return [node for node in self.nodes.values() if node.slots and not node.left_out]

    def _start_actors(self) -> None:
        """Start as many as are asked for and fit, evenly over the nodes that did not fail."""

        usable = self._usable()
        fit = sum(node.slots for node in usable)
        count = min(self.job.limits.actors or fit, fit)
        here = Counter(member.node.identity for member in self._members())
        left = len(self.waiting) + len(self.suspects)  # batches of the busy ones are theirs
        starting = len(self.idle) + sum(not call.batch for call in self.calls.values())
        while here.total() < count and starting < left:
            free = [node for node in usable if here[node.identity] < node.slots]
            node = min(free, key=lambda node: (node.deaths, here[node.identity] / node.slots))
            name = f"ray-{uuid.uuid4().hex[:12]}"
            opener = partial(self.opener, share={k: v // count for k, v in self.share.items()})
            placed = dict(
                num_cpus=1,
                num_gpus=1 / self.shares if self.shares else 0,
                scheduling_strategy=On(node.identity, soft=False),
            )
            start: Any = ray.remote(**placed)(Actor)
            actor = start.remote(self.job, name, opener, max(1, node.cores // node.slots))
            member = _Member(actor, node, name, self.most)
            self.calls[actor.join.remote(os.getcwd())] = _Call(member, [])
            here[node.identity] += 1
            starting += 1

    def _leave_out(self, node: _Node, reason: str) -> None:
        node.left_out = reason
        log.warning("node %s is left out: %s", node.name, reason)
        self.looked = 0.0

    # ---- items

    def _hand_out(self) -> None:
        for member in list(self.idle):
            batch, suspect = self._next(member)
            if batch:
                self.idle.remove(member)
                self.calls[member.actor.make.remote(batch)] = _Call(member, batch, suspect)

    def _next(self, member: _Member) -> tuple[list[Item], bool]:
        """Items for ``member``, and whether an actor has died of them."""
        for i, batch in enumerate(self.suspects):
            # an item that killed here is tried elsewhere, if there is an elsewhere
            if member.node.identity not in self._killed(batch) or not self._elsewhere(batch):
                del self.suspects[i]
                return batch, True
        share = -(-len(self.waiting) // len(self._members()))  # the last ones end together
        most = min(member.wanted, self.ceiling, share)
        batch = []
        while self.waiting and len(batch) < most:
            if batch and _alike(self.waiting[0]) != _alike(batch[0]):
                break
            batch.append(self.waiting.popleft())
        return batch, False

    def _killed(self, batch: Sequence[Item]) -> list[str]:
        """The nodes where the item of ``batch``, alone, killed its actors."""
        return self.killed.get(batch[0].id, []) if len(batch) == 1 else []

    def _elsewhere(self, batch: Sequence[Item]) -> bool:
        """Whether there is an actor on a node where it did not."""
        return any(member.node.identity not in self._killed(batch) for member in self._members())

    def _take(self, reference: Any) -> None:
        """Count what a call came to."""
        call = self.calls.pop(reference)
        member, batch, _ = call
        try:
            found = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            self._refused(call, error.cause or error)
        except ray.exceptions.RayError as error:  # dead, out of memory, its node lost
            self._died(call, error)
        else:
            if batch:
                self._made(member, *found)
            elif found != self.code:
                ours, theirs = (set(each.items()) for each in (self.code, found))
                said = ", ".join(f"{k} {v}" for k, v in sorted(theirs - ours))
                wanted = ", ".join(f"{k} {v}" for k, v in sorted(ours - theirs))
                ray.kill(member.actor)
                self._leave_out(member.node, f"it has {said}, and this machine {wanted}")
            else:
                self.idle.append(member)

    def _made(self, member: _Member, counts: JobCounts, wanted: int) -> None:
        member.node.deaths = 0
        member.wanted = max(wanted, 1)
        member.busy += counts.busy
        member.made += len(counts.done)
        self._count(counts)
        self.idle.append(member)

    def _count(self, counts: JobCounts) -> None:
        self.counts.done += counts.done
        self.counts.failed += counts.failed
        if self.bar is not None:
            done, failed = len(counts.done), len(counts.failed)
            self.bar.observe(done, failed, done + failed, counts.busy, self._slow())

    def _slow(self) -> str:
        """The node of an actor that is much slower than the others, "" if there is none."""
        members = [member for member in self._members() if member.busy]
        rates = {member: member.made / member.busy for member in members}
        usual = statistics.median(rates.values()) if rates else 0.0
        slowest = min(rates, key=rates.__getitem__, default=None)
        return slowest.node.name if slowest and rates[slowest] < SLOW * usual else ""

    def _refused(self, call: _Call, error: BaseException) -> None:
        """An actor could not begin, or raised what is not about its items."""
        member, batch, _ = call
        ray.kill(member.actor)
        if batch and not isinstance(error, OtherPlace):
            raise error
        self.waiting.extendleft(reversed(batch))
        self._leave_out(member.node, _sentence(error))

    def _died(self, call: _Call, error: BaseException) -> None:
        """Hand out again what a dead actor has left."""
        member, batch, suspect = call
        node = member.node
        ray.kill(member.actor)
        known = Ledger(self.job.journals, member.name)
        left = [item for item in batch if item.id not in known]
        made = [item.id for item in batch if item.id in known]
        done = [name for name in made if known.is_done(name)]
        self._count(JobCounts(done, [name for name in made if name not in done]))
        reason = f"its worker died: {_sentence(error)}"
        others = sum(each.node is node for each in self._members())
        if isinstance(error, ray.exceptions.OutOfMemoryError) and others:
            node.slots = others
            self.ceiling = max(1, len(batch) // 2) if batch else self.ceiling
            log.warning(
                "memory ran out on %s: %d workers are there now, and at most %d items at a time",
                *(node.name, others, self.ceiling),
            )
            self.waiting.extendleft(reversed(left))
            return
        if not suspect:
            node.deaths += 1
            alone = self._usable() == [node]
            if node.deaths >= (max(DEATHS, node.slots + 1) if alone else DEATHS):
                self._leave_out(
                    node, f"{node.deaths} workers died there one after the other, {reason}"
                )
        if len(left) > 1:
            middle = len(left) // 2
            self.suspects += [left[:middle], left[middle:]]
        elif left:
            self._died_of(left[0], node, reason)

    def _died_of(self, item: Item, node: _Node, reason: str) -> None:
        """Try ``item``, which killed its actor alone, elsewhere and again, or set it aside."""
        nodes = self.killed.setdefault(item.id, [])
        nodes.append(node.identity)
        enough = len(nodes) > self.job.limits.retries
        if not enough or (len(set(nodes)) == 1 and self._elsewhere([item])):
            self.suspects.append([item])
            return
        self.journal.append([failure(item, reason, len(nodes))])
        self._count(JobCounts([], [item.id]))


def _alike(item: Item) -> tuple[Any, ...]:
    """What items of one batch have in common, so that actors are not given a mixture."""
    shown = len(item.images), len(item.videos)
    return item.method or "", *shown, str(item.draw), repr(item.options)


def _sentence(error: BaseException) -> str:
    """The last line, where Ray says why."""
    return next(filter(None, reversed(str(error).strip().splitlines())), "").strip()[:300]
