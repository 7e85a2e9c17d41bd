"""Decisions of a job before its first result: the number of threads, and for each method whether
its pictures are compiled.

Rounding depends on the number of threads, on compiling, and on the number of rows of a program. So
that a result does not depend on when, or beside which items, it is made, a whole job uses one
number of threads, and all of a method's pictures are drawn by programs of one number of rows, or
none is. The decisions are stored in ``job.json``; a resumed job follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from specmm.choose.threads import settled
from specmm.choose.when_compiled import Compiled
from specmm.image_ar.records import made_by
from specmm.jobs.folder import Job, decided, deciding
from specmm.jobs.items import Item

USUAL = 4  # rows of a program, where the job does not say how many items are made at a time
THREADS, PLACE, ROWS = "threads", "place", "rows"  # job.json's entries
SAME = ("dtype", "device", "processor", "versions")  # facts that do not change in a job


class OtherPlace(ValueError):
    """A job's results would differ here from those of the place where it was begun."""


@contextmanager
def one_number_of_threads(folder: Path, network: nn.Module | None) -> Iterator[None]:
    """Context with the number of threads of the job in ``folder``: the number named at its start,
    or the fastest for ``network``.

    Raises ``ValueError`` if ``--threads`` or :func:`specmm.threads` names another number now, and
    :class:`OtherPlace` if the job was begun on a machine whose results differ.
    """
    if network is None:
        yield
        return
    here = {name: found for name, found in made_by({}, "", {}, network).items() if name in SAME}
    here["device"] = here["device"].partition(":")[0]  # processes have a GPU each
    with deciding(folder) as found:
        began = found.setdefault(PLACE, here)
        changed = [f"{k} {began[k]}, got {here[k]}" for k in SAME if began[k] != here[k]]
        if changed:
            raise OtherPlace(
                f"{folder} was begun with {'; '.join(changed)}: results of both would "
                "mix; go on there, or choose another --out"
            )
        with settled(network, found.get(THREADS)) as choice:
            found[THREADS] = choice.count
    with settled(network, choice.count):
        yield


def place_of_job(folder: Path) -> dict[str, Any]:
    """Threads, dtype, device and versions of the job in ``folder``, as far as it began."""
    settings = decided(folder)
    return {THREADS: settings.get(THREADS), **settings.get(PLACE, {})}


class Programs:
    """The decisions of a ``job`` on programs, by a method's name and options."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.known: dict[str, int] = {}

    def decided(self, method: str) -> int | None:
        """Rows of the programs of ``method``, 0 where it is not compiled; None: not decided."""
        if method not in self.known:
            self.known = decided(self.job.folder).get(ROWS, {})
        return self.known.get(method)

    def rows_to_be(self, method: str) -> int:
        """Rows of the programs of ``method`` if it is compiled."""
        return self.decided(method) or self.job.limits.batch or USUAL

    def rows(self, method: str, pays: Callable[[], bool]) -> int:
        """Rows of the programs of ``method``, 0 where it is not compiled.

        ``pays`` is called, outside of any lock because it may take a while, if nothing was decided
        yet.
        """
        if (rows := self.decided(method)) is not None:
            return rows
        rows = self.rows_to_be(method) if pays() else 0
        with deciding(self.job.folder) as found:
            self.known = found.setdefault(ROWS, {})
            return self.known.setdefault(method, rows)


def check_compiled_kinds(compiled: Compiled, kinds: Collection[str]) -> None:
    """Raise ``ValueError`` for a job to be ``compiled`` of ``kinds`` of items that would then
    depend on their batch: programs fit the longest prompt in it.
    """
    others = {*kinds} - {"class"}
    if compiled and others:
        raise ValueError(
            f"--compiled serves jobs of classes, got a {min(others)}: programs depend on the "
            "longest text of a batch, and no result of a job may; leave it out"
        )


def padded(items: Sequence[Item], rows: int) -> list[Item]:
    """``items``, followed by copies of the last one up to whole batches of ``rows``."""
    return [*items, *[items[-1]] * (-len(items) % rows)]
