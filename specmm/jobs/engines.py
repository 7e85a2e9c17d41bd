"""Who works on a job: this process, one process of many started by a launcher, or actors of a Ray
cluster.

Processes share nothing but the output folder, so none waits for another and any may die; whoever
finishes last leaves the whole index.

Shape letters: none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specmm.jobs.items import Item
from specmm.jobs.journal import occupied
from specmm.jobs.run import JobCounts, Opener, Watch, work
from specmm.jobs.spec import Limits, Spec
from specmm.jobs.store import JOURNALS, remove_parts
from specmm.jobs.workers import Worker, open_worker

ENGINES = ("local", "accelerate", "ray")


def run_local(
    folder: Path,
    spec: Spec,
    limits: Limits,
    items: Sequence[Item],
    watch: Watch | None = None,
    opener: Opener | None = None,
) -> JobCounts:
    """Make ``items`` here, alone in ``folder``. Raises ``ValueError`` when another process works
    there.
    """
    with occupied(folder / JOURNALS, shared=False):
        remove_parts(folder)
        return work(
            folder,
            spec,
            limits,
            items,
            opener or opener_of(spec, items, limits.device),
            "local",
            watch,
        )


def run_rank(
    folder: Path,
    spec: Spec,
    limits: Limits,
    items: Sequence[Item],
    watch: Watch | None = None,
    opener: Opener | None = None,
) -> JobCounts:
    """Make those of ``items`` (already this process's, see ``share``) under a journal of its own."""
    name = f"rank-{rank()[0]:05d}"
    with occupied(folder / JOURNALS, shared=True):
        return work(
            folder,
            spec,
            limits,
            items,
            opener or opener_of(spec, items, device_of_rank()),
            name,
            watch,
        )


def rank() -> tuple[int, int]:
    """This process's number and how many there are, as ``accelerate launch`` and ``torchrun`` say.

    Raises ``ValueError`` where neither started it.
    """
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise ValueError(
            "engine accelerate must be started by torchrun --no-python specmm batch … (or accelerate launch), "
            "got no RANK and WORLD_SIZE; do that, or use --engine local"
        ) from None


def share(items: Sequence[Item]) -> list[Item]:
    """This rank's part of all items of the job, done or not: the same whenever it is asked."""
    number, count = rank()
    return list(items[number::count])


def device_of_rank() -> str:
    """The rank's own GPU, or the CPU."""
    import torch

    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}" if torch.cuda.is_available() else "cpu"


def opener_of(spec: Spec, items: Sequence[Item], device: str) -> Opener:
    """Loads the worker when it is called for."""

    def open_it() -> Worker:
        return open_worker(spec, items, device)

    return open_it
