"""What is done, on disk, line by line: the one truth about a job, written after the files it speaks
of.

A line is a checksum and a JSON record. A process that dies while it writes leaves a torn last line,
which is cut off when the journal is opened again. Every process of a job appends to a journal of
its own and reads all of them.

Shape letters: none.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def pack(record: Record) -> bytes:
    """A line of the journal."""
    text = json.dumps(record, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def unpack(line: bytes) -> Record | None:
    """The record of a line; None for a line that was not written whole."""
    text = line[9:-1]
    try:
        if line[-1:] != b"\n" or int(line[:8], 16) != zlib.crc32(text):
            return None
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def occupied(folder: Path, shared: bool) -> Iterator[None]:
    """Keep other jobs out of ``folder``, those that share it excepted; raises ``ValueError`` when
    one is there.
    """
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    _take(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, folder)
    try:
        yield
    finally:
        os.close(handle)


def _take(handle: int, mode: int, folder: Path) -> None:
    """Lock an open file; the system lets go of it when the process ends, however it does."""
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ValueError(
            f"{folder.parent} is being written by another process, wait for it or choose another --out"
        ) from error


class Journal:
    """The journal of one process in ``folder``; at most one process holds it.

    Raises ``ValueError`` when another one does.
    """

    def __init__(self, folder: Path, name: str) -> None:
        file = folder / f"{name}.log"
        self.handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _take(self.handle, fcntl.LOCK_EX, folder)
        self.size = _whole(file.read_bytes())
        os.ftruncate(self.handle, self.size)

    def append(self, records: Sequence[Record]) -> None:
        """Add ``records``; they are on the disk when this returns. Raises ``OSError`` having added
        none of them.
        """
        data = b"".join(map(pack, records))
        try:
            written = 0
            while written < len(data):  # a nearly full disk takes a part first
                written += os.write(self.handle, data[written:])
            os.fsync(self.handle)
        except OSError:
            os.ftruncate(self.handle, self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self.handle)


def _whole(data: bytes) -> int:
    """Bytes up to the end of the last whole line."""
    end = place = 0
    for line in data.splitlines(keepends=True):
        place += len(line)
        end = place if unpack(line) is not None else end
    return end


def read_journals(folder: Path) -> Iterator[Record]:
    """The records of all journals in ``folder``; lines that were not written whole are passed over."""
    for file in sorted(folder.glob("*.log")):
        with file.open("rb") as stream:
            for line in stream:
                record = unpack(line)
                if record is not None:
                    yield record


def ledger(folder: Path) -> dict[str, Record]:
    """The last word on every item by id: "done" stands against "failed", and the latest "done"
    against others.

    A result that was repaired has two: journals are read in no order of time, so a record says when
    it was written.
    """
    found: dict[str, Record] = {}
    for record in read_journals(folder):
        if "id" in record and _stands(record, found.get(record["id"])):
            found[record["id"]] = record
    return found


def _stands(record: Record, known: Record | None) -> bool:
    """Whether ``record`` takes the place of what was ``known`` of its item."""
    if known is None or known["state"] != "done":
        return True
    return bool(record["state"] == "done" and record.get("at", 0) > known.get("at", 0))
