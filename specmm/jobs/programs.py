"""Whether a job's pictures are compiled: decided once for each method, before its first picture.

Programs round otherwise than the same steps uncompiled, and programs of other numbers of rows
otherwise again, as do those of other numbers of threads. So that a picture does not depend on when
or beside what it is drawn, all of a method's pictures are drawn by programs of one number of rows,
or none is. ``programs.json`` beside ``job.json`` says which: whoever goes on does as it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specmm.checkpoints import read_json
from specmm.files import sync_folder, write_whole
from specmm.jobs.folder import PROGRAMS, Job, alone
from specmm.jobs.items import Item
from specmm.when_compiled import Compiled

USUAL = 4  # rows of a program, where the job does not say how many items are made at a time
THREADS, ROWS = "threads", "rows"  # what programs.json holds


@dataclass
class Programs:
    """The decisions of a ``job``, by a method's name and options."""

    job: Job
    known: dict[str, int] = field(default_factory=dict)

    def rows_to_be(self, method: str) -> int:
        """Rows of the programs of ``method`` if it is compiled."""
        if method not in self.known:
            self.known = self._read().get(ROWS, {})
        return self.known.get(method) or self.job.limits.batch or USUAL

    def compiled(self, method: str) -> bool:
        """Whether it was decided that ``method`` is."""
        return bool(self._read().get(ROWS, {}).get(method))

    def check_threads(self) -> None:
        """Raise ``ValueError`` where programs ran with other threads, which round otherwise."""
        made = self._read()
        threads = made.get(THREADS)
        if any(made.get(ROWS, {}).values()) and threads != torch.get_num_threads():
            raise ValueError(
                f"{self.job.folder} was compiled for {threads} threads, got "
                f"{torch.get_num_threads()}; set OMP_NUM_THREADS={threads}, or choose another --out"
            )

    def rows(self, method: str, pays: Callable[[], bool]) -> int:
        """Rows of the programs of ``method``, 0 where it is not compiled.

        ``pays`` is asked where nothing was decided, outside of any lock: it may take a while.
        """
        rows = self.rows_to_be(method)
        if method not in self.known:
            self._settle(method, rows if pays() else 0)
            self.check_threads()  # another process may have decided
        return self.known[method]

    def _settle(self, method: str, rows: int) -> None:
        """Write a decision down, unless another process was first."""
        with alone(self.job.folder):
            found = self._read()
            self.known = {method: rows} | found.get(ROWS, {})
            ran = any(found.get(ROWS, {}).values())
            threads = found[THREADS] if ran else torch.get_num_threads()
            made = {THREADS: threads, ROWS: self.known}
            text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
            write_whole(self.job.folder / PROGRAMS, text.encode(), durable=True)
            sync_folder(self.job.folder)

    def _read(self) -> dict[str, Any]:
        file = self.job.folder / PROGRAMS
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
