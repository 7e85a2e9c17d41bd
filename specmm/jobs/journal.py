"""The journals of a job, which record the outcome of its items.

They are authoritative: a line is written only after the files it describes (:mod:`.results`). A
line is a checksum and a JSON record. A journal is a series of files, each of which is written whole
with every append, on a disk as in object storage, so a process that dies tears none. Every process
of a job has its own journal and reads all of them.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from specmm.image_ar.records import Record
from specmm.jobs.items import Item
from specmm.loading.files import sync_folder, write_whole

# of a line, where nothing in the id is escaped; a fifth of the time of JSON
HEAD = re.compile(rb'{"id":"([^"\\]*)","state":"(\w+)","at":([\d.]+),"item":"(\w+)"[,}]')
PART = 2**18  # bytes of a journal's file, all of which are written again for each append


def pack(record: Record) -> bytes:
    """A line of the journal."""
    text = json.dumps(record, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def unpack(line: bytes) -> bytes | None:
    """The record of a line as JSON; None for a line that is not whole."""
    text = line[9:-1]
    return text if line == b"%08x %s\n" % (zlib.crc32(text), text) else None


def failure(item: Item, error: str, tries: int) -> Record:
    """The record of an item that is set aside."""
    now = {"at": time.time(), "item": item.digest}
    return {"id": item.id, "state": "failed", **now, "error": error, "tries": tries}


class Journal:
    """The journal of the process called ``name``: files ``NAME-TIME.log`` in ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._begin()

    def _begin(self) -> None:
        self.file = self.folder / f"{self.name}-{time.time_ns()}.log"
        self.data = b""

    def append(self, records: Sequence[Record]) -> None:
        """Add ``records``; they are on the disk when this returns. Raises ``OSError``."""
        data = self.data + b"".join(map(pack, records))
        write_whole(self.file, data, durable=True)
        sync_folder(self.folder)
        self.data = data
        if len(data) > PART:
            self._begin()


def read_journals(folder: Path, name: str = "") -> Iterator[tuple[str, bytes]]:
    """The records of all journals, or of the one called ``name``, as JSON, each after its journal's
    name; lines that are not whole are skipped.
    """
    for file in sorted(folder.glob(f"{name}*.log")):
        journal = file.name.rpartition("-")[0]
        with file.open("rb") as stream:
            yield from ((journal, text) for text in map(unpack, stream) if text is not None)


class Outcome(NamedTuple):
    """A record's head: whether the item with this ``id`` is ``done`` or set aside, ``at`` what
    time, and the digest of its ``item``; and the whole ``record`` as JSON, with its journal's name.
    """

    id: str
    done: bool
    at: float
    item: str
    journal: str
    record: bytes


def outcomes(folder: Path, name: str = "") -> Iterator[Outcome]:
    """The records of :func:`read_journals`, of which the heads alone are read."""
    for journal, text in read_journals(folder, name):
        if head := HEAD.match(text):
            identity, state, at, digest = map(bytes.decode, head.groups())
        else:
            record = json.loads(text)
            names = "id", "state", "at", "item"
            identity, state, at, digest = (record.get(name, "") for name in names)
        yield Outcome(identity, state == "done", float(at or 0), digest, journal, text)


class Ledger(Mapping[str, Record]):
    """The valid record of every item, by id: "done" before "failed", and the latest of several (a
    repaired result has two; records hold their time, since journals are not read in order of time).

    Records lie in an unnamed database, which is deleted with the ledger: a million in memory would
    be gigabytes. With ``name`` only that journal is read.
    """

    def __init__(self, journals: Path, name: str = "") -> None:
        self._base = sqlite3.connect("")
        self._base.execute("pragma journal_mode = off")
        self._base.execute(
            "create table items (id text primary key, done, at, item, journal, record)"
        )
        self._base.executemany(
            "insert into items values (?, ?, ?, ?, ?, ?) on conflict (id) do update set done = "
            "excluded.done, at = excluded.at, item = excluded.item, "
            "journal = excluded.journal, record = excluded.record "
            "where (excluded.done, excluded.at) > (items.done, items.at)",
            outcomes(journals, name),
        )

    def __getitem__(self, identity: str) -> Record:
        asked = "select record from items where id = ?"
        for (text,) in self._base.execute(asked, (identity,)):
            record: Record = json.loads(text)
            return record
        raise KeyError(identity)

    def __iter__(self) -> Iterator[str]:
        return (name for (name,) in self._base.execute("select id from items order by rowid"))

    def __len__(self) -> int:
        count: int = self._base.execute("select count(*) from items").fetchone()[0]
        return count

    def is_done(self, identity: str) -> bool:
        """Whether the item is done: neither set aside nor left."""
        asked = "select done from items where id = ?"
        return self._base.execute(asked, (identity,)).fetchone() == (1,)

    def count_done(self) -> int:
        """How many items are done."""
        count: int = self._base.execute("select count(*) from items where done").fetchone()[0]
        return count

    def since(self, moment: float) -> list[tuple[int, float, float]]:
        """For every journal with records after ``moment``: their number, first and last time."""
        asked = "select count(*), min(at), max(at) from items where at > ? group by journal"
        return self._base.execute(asked, (moment,)).fetchall()
