"""Engine ``ray``: a crew of actors on the nodes of a Ray cluster.

Ray starts actors, tells of their deaths and knows the nodes. The crew decides what they mean:

- An actor gets items once it has joined: it could be scheduled, and has the driver's code. A node
  with other code, or whose results would be others, is left out.
- The unfinished items of a dead actor count as faulty; the loop halves them until the item that
  kills is alone.
- A node whose actors die twice, whatever they make, is left out while others are there.
- After running out of memory a node gets one actor fewer, and batches of half the size.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from specmm.image_ar.records import versions
from specmm.jobs.folder import Job
from specmm.jobs.items import Item
from specmm.jobs.journal import Journal, Ledger
from specmm.jobs.making import FIRST, Fault, Made, Maker, Opener, making
from specmm.jobs.programs import OtherPlace
from specmm.jobs.progress import Progress
from specmm.jobs.run import Loop, Member
from specmm.runs.ray_cluster import connect, last_line, living_nodes

log = logging.getLogger(__name__)
LOOK = 1.0  # seconds between two looks at the nodes
DEATHS = 2  # deaths in a row of a node's actors, on any items, while others live


def run_ray(job: Job, items: Sequence[Item], opener: Opener, progress: Progress) -> None:
    """Make ``items`` with the actors of a Ray cluster.

    Raises ``ValueError`` where no node can make them, or no cluster can be used.
    """
    connect()
    job = replace(job, folder=job.folder.absolute())
    crew = Cluster(job, opener, len(items))
    try:
        journal = Journal(job.journals, "ray-driver")
        Loop(job, crew, journal, progress, attrgetter("alike")).run(items)
    finally:
        for member in crew.members:
            ray.kill(member.actor)


def code() -> dict[str, str]:
    """Versions of the software that results depend on, with a digest of our own source."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    files = (Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names)
    for file in sorted(file for file in files if file.suffix == ".py"):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return {**versions(), "source": digest.hexdigest()[:12]}


class Actor:
    """A process of the cluster; it loads the model when the first items come.

    It works in the driver's ``folder`` where that is there, so that relative paths are the same.
    """

    def __init__(self, job: Job, name: str, opener: Opener, threads: int) -> None:
        self.given = job, opener, name
        self.maker: Maker | None = None
        torch.set_num_threads(min(threads, os.cpu_count() or 1))  # Ray sets it to one

    def join(self, folder: str, wanted: dict[str, str]) -> None:
        """Work in the driver's ``folder``, if it is here, too.

        Raises :class:`OtherPlace` if the code here is not the driver's, ``wanted``.
        """
        if os.path.isdir(folder):
            os.chdir(folder)
        if (here := code()) != wanted:
            differs_here = ", ".join(f"{k} {v}" for k, v in here.items() if wanted.get(k) != v)
            differs_there = ", ".join(f"{k} {v}" for k, v in wanted.items() if here.get(k) != v)
            raise OtherPlace(f"it has {differs_here}, and the driver {differs_there}")

    def make(self, items: list[Item]) -> Made:
        """The outcome of ``items``."""
        if self.maker is None:
            job, opener, name = self.given
            self.open = ExitStack()  # as long as the actor
            self.maker = self.open.enter_context(making(job, opener, name))
        return self.maker.make(items)


@dataclass(eq=False)
class Node:
    """A machine of the cluster; ``slots`` actors have a place there."""

    identity: str
    name: str
    slots: int
    cores: int
    deaths: int = 0  # in a row, on any items
    left_out: str = ""  # why

    def __str__(self) -> str:
        return self.name


class Cluster:
    """Actors, on nodes as they come and go."""

    def __init__(self, job: Job, opener: Opener, most: int) -> None:
        self.job = job
        self.opener = opener
        self.code = code()
        self.nodes: dict[str, Node] = {}  # by Ray's identities
        self.shares = 0  # actors of a GPU
        self.idle: list[Member] = []
        self.calls: dict[Any, Member] = {}  # by Ray's references; without items it joins
        self.most = most  # items at a time, less once memory ran out
        self.looked = 0.0
        self.said: set[str] = set()

    @property
    def members(self) -> Sequence[Member]:
        return [*self.idle, *self.calls.values()]

    def free(self, left: int) -> Sequence[Member]:
        self._look()
        self._start_actors(left)
        for member in self.idle:
            member.wanted = min(member.wanted, self.most)
        return list(self.idle)

    def begin(self, member: Member) -> None:
        self.idle.remove(member)
        self.calls[member.actor.make.remote(member.items)] = member

    def ended(self) -> Sequence[tuple[Member, Made]]:
        if not self.calls:
            time.sleep(LOOK)
            return []
        ready = ray.wait(list(self.calls), timeout=LOOK)[0]
        outcomes = [self._take(call) for call in ready]
        return [(member, made) for member, made in outcomes if member.items]

    def _say(self, text: str) -> None:
        """Print ``text`` once."""
        if text not in self.said:
            log.warning(text)
            self.said.add(text)

    # ---- nodes

    def _look(self) -> None:
        """Update the list of nodes.

        Raises ``ValueError`` where all of them are left out, and where this process's died.
        """
        if time.monotonic() - self.looked < LOOK:
            return
        self.looked = time.monotonic()
        alive = living_nodes()
        device, asked = self.job.limits.device, self.job.limits.actors
        total = sum(int(node["Resources"].get("GPU", 0)) for node in alive.values())
        on_gpus = device != "cpu" and (device.startswith("cuda") or total > 0)
        self.shares = max(1, -(-asked // max(total, 1))) if on_gpus else 0
        self.nodes = {i: self.nodes.get(i) or self._node(node) for i, node in alive.items()}
        usable = self._usable()
        fit = sum(node.slots for node in usable)
        if usable and asked > fit:
            self._say(f"{fit} workers fit into the cluster, not {asked}")
        out = [f"{node}: {node.left_out}" for node in self.nodes.values() if node.left_out]
        if out and not usable:
            raise ValueError(f"no node of the Ray cluster can make the items: {'; '.join(out)}")
        if not usable:
            kind = "GPU" if on_gpus else "CPU"
            self._say(
                f"the Ray cluster has no node with a {kind} for workers, waiting until one joins "
                "(ray start --address …)"
            )

    def _node(self, found: dict[str, Any]) -> Node:
        """A node as Ray describes it."""
        cores, gpus = (int(found["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
        slots = min(gpus * self.shares, cores) if self.shares else cores
        name = f"{found['NodeManagerHostname']} ({found['NodeManagerAddress']})"
        return Node(found["NodeID"], name, slots, cores)

    def _usable(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.slots and not node.left_out]

    def _start_actors(self, left: int) -> None:
        """Start actors, as many as were asked for and fit and the ``left`` batches need, evenly
        over the nodes that did not fail.
        """
        usable = self._usable()
        fit = sum(node.slots for node in usable)
        count = min(self.job.limits.actors or fit, fit)
        here = Counter(member.node for member in self.members)
        starting = len(self.idle) + sum(not each.items for each in self.calls.values())
        while here.total() < count and starting < left:
            free = [node for node in usable if here[node] < node.slots]
            node = min(free, key=lambda node: (node.deaths, here[node] / node.slots))
            self._start_actor(node, count)
            here[node] += 1
            starting += 1

    def _start_actor(self, node: Node, count: int) -> None:
        """Start an actor on ``node``, one of ``count``."""
        name = f"ray-{uuid.uuid4().hex[:12]}"
        share = {method: left // count for method, left in self.job.left.items()}
        placed = dict(
            num_cpus=1,
            num_gpus=1 / self.shares if self.shares else 0,
            scheduling_strategy=On(node.identity, soft=False),
        )
        start: Any = ray.remote(**placed)(Actor)
        threads = max(1, node.cores // node.slots)
        actor = start.remote(replace(self.job, left=share), name, self.opener, threads)
        member = Member(node, name, self.job.limits.batch or FIRST, actor)
        self.calls[actor.join.remote(os.getcwd(), self.code)] = member

    def _leave_out(self, node: Node, reason: str) -> None:
        node.left_out = reason
        log.warning("node %s is left out: %s", node, reason)
        self.looked = 0.0

    # ---- what calls came to

    def _take(self, call: Any) -> tuple[Member, Made]:
        """The member of a finished ``call`` and the outcome of its items."""
        member = self.calls.pop(call)
        outcome = Made()
        try:
            result = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause or error
            ray.kill(member.actor)
            if member.items and not isinstance(cause, OtherPlace):
                raise cause from None  # the error does not concern the items
            self._leave_out(member.node, last_line(cause))
            outcome.again = member.items
        except ray.exceptions.RayError as error:  # dead, out of memory, its node lost
            outcome = self._died(member, error)
        else:
            self.idle.append(member)
            if member.items:
                outcome = result
                member.node.deaths = 0
        return member, outcome

    def _died(self, member: Member, error: BaseException) -> Made:
        """The outcome of a dead actor's items: those it had made, and faults for the rest."""
        node, items = member.node, member.items
        ray.kill(member.actor)
        known = Ledger(self.job.journals, member.name)
        left = [item for item in items if item.id not in known]
        outcome = Made([item.id for item in items if item.id in known])
        others = sum(each.node is node for each in self.members)
        if isinstance(error, ray.exceptions.OutOfMemoryError) and others:
            node.slots = others
            self.most = max(1, len(items) // 2) if items else self.most
            log.warning(
                "memory ran out on %s: %d workers are there now, and at most %d items at a time",
                *(node, others, self.most),
            )
            outcome.again = left
            return outcome
        reason = f"its worker died: {last_line(error)}"
        outcome.faults = [Fault(left, reason)] if left else []
        if not member.suspect:
            node.deaths += 1
            alone = self._usable() == [node]
            if node.deaths >= (max(DEATHS, node.slots + 1) if alone else DEATHS):
                self._leave_out(
                    node, f"{node.deaths} workers died there one after the other, {reason}"
                )
        return outcome
