"""Decisions of a job before its first result: the number of threads, and for each method whether
its pictures are compiled.

Rounding depends on the number of threads, on compiling, and on the number of rows of a program. So
that a result does not depend on when, or beside which items, it is made, a whole job uses one
number of threads, and all of a method's pictures are drawn by programs of one number of rows, or
none is. The decisions are stored in ``programs.json`` beside ``job.json``; a resumed job follows
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from specmm.choose.threads import settled
from specmm.choose.when_compiled import Compiled
from specmm.image_ar.records import made_by
from specmm.jobs.folder import PROGRAMS, Job, alone
from specmm.jobs.items import Item
from specmm.loading.checkpoints import read_json
from specmm.loading.files import sync_folder, write_whole

USUAL = 4  # rows of a program, where the job does not say how many items are made at a time
THREADS, PLACE, ROWS, ITEMS = "threads", "place", "rows", "items"  # what programs.json holds
SAME = ("dtype", "device", "processor", "versions")  # of a place, throughout a job


class OtherPlace(ValueError):
    """The results of a job would be others here than where it was begun."""


@dataclass
class Programs:
    """The decisions of a ``job``, by a method's name and options."""

    job: Job
    known: dict[str, int] = field(default_factory=dict)

    def count(self, items: int) -> None:
        """Note how many ``items`` the job has, for whoever asks its folder alone."""
        with alone(self.job.folder):
            self._write({ITEMS: items})

    def rows_to_be(self, method: str) -> int:
        """Rows of the programs of ``method`` if it is compiled."""
        if method not in self.known:
            self.known = self._read().get(ROWS, {})
        return self.known.get(method) or self.job.limits.batch or USUAL

    def compiled(self, method: str) -> bool:
        """Whether the job decided that ``method`` is compiled."""
        return bool(self._read().get(ROWS, {}).get(method))

    @contextmanager
    def one_number_of_threads(self, network: nn.Module | None) -> Iterator[None]:
        """Context with the job's number of threads: the number named at its start, or the fastest
        for ``network``. Raises ``ValueError`` if ``--threads``
        or :func:`specmm.threads` names another number now.
        """
        if network is None:
            yield
            return
        place = self._same_place(network)
        with alone(self.job.folder), settled(network, self._read().get(THREADS)) as choice:
            self._write({THREADS: choice.count, PLACE: place})
        with settled(network, choice.count):
            yield

    def _same_place(self, network: nn.Module) -> dict[str, Any]:
        """What results depend on of this machine, which is the same for a whole job.

        Raises :class:`OtherPlace` where it is another than the job was begun with.
        """
        here = {name: found for name, found in made_by({}, "", {}, network).items() if name in SAME}
        here["device"] = here["device"].partition(":")[0]  # processes have a GPU each
        began = self._read().get(PLACE, here)
        changed = [f"{k} {began[k]}, got {here[k]}" for k in SAME if began[k] != here[k]]
        if changed:
            raise OtherPlace(
                f"{self.job.folder} was begun with {'; '.join(changed)}: results of both would "
                "mix; go on there, or choose another --out"
            )
        return here

    def rows(self, method: str, pays: Callable[[], bool]) -> int:
        """Rows of the programs of ``method``, 0 where it is not compiled.

        ``pays`` is asked where nothing was decided, outside of any lock: it may take a while.
        """
        rows = self.rows_to_be(method)
        if method not in self.known:
            self._settle(method, rows if pays() else 0)
        return self.known[method]

    def _settle(self, method: str, rows: int) -> None:
        """Write a decision down, unless another process was first."""
        with alone(self.job.folder):
            self.known = {method: rows} | self._read().get(ROWS, {})
            self._write({ROWS: self.known})

    def _write(self, more: dict[str, Any]) -> None:
        """Write ``more`` down, unless it is there."""
        found = self._read()
        if (made := found | more) != found:
            text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
            write_whole(self.job.folder / PROGRAMS, text.encode(), durable=True)
            sync_folder(self.job.folder)

    def _read(self) -> dict[str, Any]:
        return _decided(self.job.folder)


def place_of_job(folder: Path) -> dict[str, Any]:
    """Threads, dtype, device and versions of the job in ``folder``, as far as it began."""
    found = _decided(folder)
    return {THREADS: found.get(THREADS), **found.get(PLACE, {})}


def items_of_job(folder: Path) -> int:
    """How many items the job in ``folder`` had when it was run last."""
    return int(_decided(folder).get(ITEMS, 0))


def _decided(folder: Path) -> dict[str, Any]:
    file = folder / PROGRAMS
    return read_json(file) if file.exists() else {}


def check_compiled_items(compiled: Compiled, items: Sequence[Item]) -> None:
    """Raise ``ValueError`` for a job to be ``compiled`` of ``items`` that would then depend on
    their batch: programs fit the longest prompt in it.
    """
    others = {item.kind for item in items} - {"class"}
    if compiled and others:
        raise ValueError(
            f"--compiled serves jobs of classes, got a {min(others)}: programs depend on the "
            "longest text of a batch, and no result of a job may; leave it out"
        )


def padded(items: Sequence[Item], rows: int) -> list[Item]:
    """``items`` and as many more of the last one as make whole batches of ``rows``."""
    return [*items, *[items[-1]] * (-len(items) % rows)]
