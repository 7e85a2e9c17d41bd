"""A job's output folder: the job's specification, and journals of its finished items.

The journals are authoritative: a line is written only after the files it describes
(:mod:`.results`). A line is a checksum and a JSON record. A process that dies while it writes
leaves a torn last line, which is cut off when the journal is opened again. Every process of a job
appends to its own journal and reads all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from specmm.choose.when_compiled import Compiled, check_compiled
from specmm.extending.registry import unknown
from specmm.image_ar.records import FORMATS, Record
from specmm.jobs.items import Item
from specmm.jobs.locks import ALONE, NOW, SHARED, held
from specmm.loading.checkpoints import read_json
from specmm.loading.files import make_folder, sync_folder, write_whole
from specmm.zoo.model_files import check_files

JOB = "job.json"
FILES = "files"  # in it, beside the spec: the models', see specmm.zoo.model_files
PROGRAMS = "programs.json"  # see programs.py
RESULTS = "results"
JOURNALS = "journal"
ARCHIVES = "archives"
LAYOUTS = ("folders", "tar")
MAKER = "maker"  # in a result's record: what it has in common with others, told once a process

# ---- what the job is


@dataclass(frozen=True)
class Spec:
    """The specification of a job: everything that results depend on, apart from the items.

    ``method`` and its ``options`` ("KEY=VALUE") are for items without a method. ``sampling`` are
    options of the pipeline's call. ``seed`` makes the items' own seeds from their ids. With
    ``compiled`` pictures are drawn by programs, with "auto" where that pays.
    """

    model: str
    method: str = "ar"
    options: tuple[str, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: str = "auto"
    format: str = "png"
    layout: str = "folders"
    drafter: str | None = None
    text_encoder: str | None = None
    compiled: Compiled = False

    def __post_init__(self) -> None:
        check_compiled(self.compiled)
        if self.format not in FORMATS:
            raise unknown("format", self.format, FORMATS)
        if self.layout not in LAYOUTS:
            raise unknown("layout", self.layout, LAYOUTS)

    @property
    def models(self) -> list[str]:
        """Names of the model, the drafter and the text encoder, where there are any."""
        return [name for name in (self.model, self.drafter, self.text_encoder) if name]


@dataclass(frozen=True)
class Limits:
    """Settings of the work on a job that do not affect its results.

    ``batch`` items are made at a time (0 finds the size), an item is tried ``retries`` more times,
    an archive holds ``shard`` items. ``actors``: number for engine ray (0: one per GPU or core).
    """

    batch: int = 0
    retries: int = 2
    shard: int = 1000
    device: str = "auto"
    actors: int = 0


@dataclass(frozen=True)
class Job:
    """The job in an output ``folder``, whose results are made by ``spec``."""

    folder: Path
    spec: Spec
    limits: Limits = Limits()

    @property
    def journals(self) -> Path:
        """The folder of the journals."""
        return self.folder / JOURNALS


def alone(folder: Path) -> AbstractContextManager[None]:
    """Context that waits until no other process prepares or finishes the job in ``folder``."""
    return held(folder / JOURNALS / "folder.lock", ALONE)


def prepare(folder: Path, spec: Spec, files: Mapping[str, str] | None = None) -> None:
    """Make the output ``folder``, or check that the results in it are of the same job.

    ``files``: digests of its models' files, by :mod:`specmm.zoo.model_files`. Raises ``ValueError``
    naming the differences.
    """
    for name in (JOURNALS, RESULTS, *([ARCHIVES] if spec.layout == "tar" else [])):
        make_folder(folder / name)
    file = folder / JOB
    wanted = json.loads(json.dumps({**asdict(spec), FILES: files or {}}))
    with alone(folder):
        if not file.exists() or not any(True for _ in read_journals(folder / JOURNALS)):
            if file.exists() and read_json(file) != wanted:  # another job, which made nothing
                (folder / PROGRAMS).unlink(missing_ok=True)
            text = json.dumps(wanted, indent=1, ensure_ascii=False) + "\n"
            write_whole(file, text.encode(), durable=True)
            sync_folder(folder)
            return
        found = read_json(file)
    check_files(folder, found.pop(FILES, {}), wanted.pop(FILES))
    changed = [
        f"{k} {found.get(k)!r} and not {v!r}" for k, v in wanted.items() if found.get(k) != v
    ]
    if changed:
        raise ValueError(
            f"{folder} holds a job with {', '.join(changed)}; "
            "give the same options or another --out"
        )


def read_spec(folder: Path) -> Spec:
    """The spec of the job in ``folder``; raises ``ValueError`` when there is none."""
    try:
        found = read_json(folder / JOB)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} must be the output of specmm batch, got a folder without {JOB}"
        ) from None
    found.pop(FILES, None)
    return Spec(**{**found, "options": tuple(found.get("options", ()))})


# ---- what is done

DIGEST = 2**64 - 1
RECENT = 1000  # records of a journal by whose times a rate is told
PART = 2**18  # bytes of a journal's object, all of which are written again for each append
HEAD = re.compile(  # of a line about an item: its id, state, time and digest, without the rest
    rb'[0-9a-f]{8} {"id":("(?:[^"\\]|\\.)*"),"state":"(done|failed)",'
    rb'(?:"at":([^,]*),)?"item":"([0-9a-f]{16})"'
)


def pack(record: Record) -> bytes:
    """A line of the journal."""
    text = json.dumps(record, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def unpack(line: bytes) -> Record | None:
    """The record of a line; None for a line that was not written whole."""
    if not _is_whole(line):
        return None
    try:
        found = json.loads(line[9:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_whole(line: bytes) -> bool:
    try:
        return line[-1:] == b"\n" and int(line[:8], 16) == zlib.crc32(line[9:-1])
    except ValueError:
        return False


def occupied(journals: Path, shared: bool) -> AbstractContextManager[None]:
    """Context that keeps other jobs out of the folder of ``journals``, except those that share it.

    Raises ``ValueError`` when another one works there.
    """
    mode, rivals = (SHARED, "lock.lease") if shared else (ALONE, "*.lease")
    return held(journals / "lock", mode | NOW, rivals)


class Journal:
    """The journal of one process in ``journals``; at most one process holds it.

    Raises ``ValueError`` when another one does.
    """

    def __init__(self, journals: Path, name: str) -> None:
        self.told: set[str] = set()  # makers
        self.lock = ExitStack()
        file = journals / f"{name}.log"
        self.lock.enter_context(held(file, ALONE | NOW))
        self.log = _Log(file) if isinstance(file, Path) else _Parts(file)

    def append(self, records: Sequence[Record]) -> None:
        """Add ``records``; they are on the disk when this returns.

        Raises ``OSError`` having added none of them.
        """
        makers = {}
        short = []
        for record in records:
            if MAKER in record:
                text = json.dumps(record[MAKER], sort_keys=True)
                name = hashlib.sha256(text.encode()).hexdigest()[:12]
                makers[name] = record[MAKER]
                record = {**record, MAKER: name}
            short.append(record)
        new = [{MAKER: name, "is": makers[name]} for name in makers.keys() - self.told]
        self.log.append(b"".join(map(pack, [*new, *short])))
        self.told |= makers.keys()

    def close(self) -> None:
        """Let another process have it."""
        self.log.close()
        self.lock.close()


class _Log:
    """A journal that is one file, which grows."""

    def __init__(self, file: Path) -> None:
        self.handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = _whole(self.handle)
        os.ftruncate(self.handle, self.size)

    def append(self, data: bytes) -> None:
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
        os.close(self.handle)


class _Parts:
    """A journal in object storage, where nothing grows: objects ``NAME-TIME.log`` that are written
    again with every append until one holds ``PART`` bytes. Those of earlier processes stay.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._begin()

    def _begin(self) -> None:
        self.part = self.file.with_name(f"{self.file.stem}-{time.time_ns()}.log")
        self.data = b""

    def append(self, data: bytes) -> None:
        write_whole(self.part, self.data + data)
        self.data += data
        if len(self.data) > PART:
            self._begin()

    def close(self) -> None:
        """Every append is written already."""


def _whole(handle: int) -> int:
    """Bytes of an open file up to the end of its last whole line, which is looked for from behind:
    a long job's is hundreds of megabytes.
    """
    size = os.fstat(handle).st_size
    for back in (2**i for i in range(16, 64)):
        start = max(size - back, 0)
        place = size
        for line in reversed(os.pread(handle, size - start, start).splitlines(keepends=True)):
            if unpack(line) is not None:
                return place
            place -= len(line)
        if start == 0:
            break
    return 0


def read_journals(journals: Path) -> Iterator[Record]:
    """The records of all journals; lines that were not written whole are skipped."""
    for file in sorted(journals.glob("*.log")):
        with file.open("rb") as stream:
            for line in stream:
                record = unpack(line)
                if record is not None:
                    yield record


def _opened(journals: Path, files: str) -> list[IO[bytes]]:
    """Journals, to read at any place; those of object storage in one copy here."""
    if isinstance(journals, Path):
        return [file.open("rb") for file in sorted(journals.glob(files))]
    copy = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the ledger
    for part in journals.glob(files):
        copy.write(part.read_bytes())
    copy.seek(0)
    return [copy]


class Ledger(Mapping[str, Record]):
    """The record that counts of every item, by id: "done" over "failed", the latest of several (a
    repaired result has two; journals are read in no order of time, so a record holds the time).

    Records stay in the journals and are read when they are asked for: a million would be two
    gigabytes. ``makers`` are what records name. ``worker`` is the one whose records alone are read.
    """

    def __init__(self, journals: Path, worker: str = "") -> None:
        self.makers: dict[str, Record] = {}
        self.recent: list[deque[float]] = []  # by journal, times of its latest records
        self._files = _opened(journals, f"{worker}*.log")
        # offset and file of a record and the item's digest in one number, below 0 if it failed
        self._places: dict[str, int] = {}
        for number in range(len(self._files)):
            self._scan(number)

    def __getitem__(self, identity: str) -> Record:
        return self._read(self._places[identity])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, identity: object) -> bool:
        return identity in self._places

    def is_done(self, identity: str) -> bool:
        """Whether the item is done, and not set aside."""
        return self._places[identity] > 0

    def digest(self, identity: str) -> str:
        """The digest of the item as it was made or set aside."""
        return f"{abs(self._places[identity]) & DIGEST:016x}"

    def _scan(self, number: int) -> None:
        """Learn what a journal holds; lines that were not written whole are skipped."""
        offset = 0
        times: deque[float] = deque(maxlen=RECENT)
        self.recent.append(times)
        for line in self._files[number]:
            if (head := self._head(line)) is not None:
                name, state, at, digest = head
                if at:
                    times.append(float(at))
                place = (((offset + 1) << 16 | number) << 64) | int(digest, 16)
                if self._counts(name, state == "done", place):
                    self._places[name] = place if state == "done" else -place
            offset += len(line)

    def _head(self, line: bytes) -> tuple[str, str, str, str] | None:
        """Id, state, time and digest of a line about an item; of others, None, makers are kept."""
        found = HEAD.match(line)
        if found is not None:  # without decoding the rest
            text, state, at, digest = (part.decode() for part in found.groups(b""))
            name = json.loads(text) if "\\" in text else text[1:-1]
            return (name, state, at, digest) if _is_whole(line) else None
        record = unpack(line) or {}
        if "is" in record:
            self.makers[record[MAKER]] = record["is"]
        return (
            (record["id"], record["state"], "", record.get("item", "0")) if "id" in record else None
        )

    def _counts(self, name: str, done: bool, place: int) -> bool:
        """Whether the record at ``place`` replaces the known one of its item."""
        known = self._places.get(name)
        if known is None or done != (known > 0):
            return known is None or done
        return bool(self._read(place).get("at", 0) > self._read(known).get("at", 0))

    def _read(self, place: int) -> Record:
        place = abs(place) >> 64
        file = self._files[place & 0xFFFF]
        before = file.tell()
        file.seek((place >> 16) - 1)  # no record is at 0, which has no sign
        found = unpack(file.readline())
        file.seek(before)
        assert found is not None, "it was whole before"
        return found


def check_same(items: Sequence[Item], known: Ledger) -> None:
    """Raise ``ValueError`` when an item that is done has changed in the job file since."""
    for item in items:
        name = item.id
        if name in known and known.is_done(name) and known.digest(name) != item.digest:
            raise ValueError(
                f"item {item.id!r} is done but has changed in the job file; "
                "give it a new id or choose another --out"
            )


def failure(item: Item, error: str, tries: int) -> Record:
    """The record of an item that is set aside."""
    now = {"at": time.time(), "item": item.digest}
    return {"id": item.id, "state": "failed", **now, "error": error, "tries": tries}


def remove_parts(folder: Path) -> None:
    """Remove files that a killed process was writing; only while no other process writes here.

    Object storage has none.
    """
    if not isinstance(folder, Path):
        return
    parts = [*folder.glob("*.part"), *(folder / ARCHIVES).glob("*.part")]
    for part in [*parts, *(folder / RESULTS).rglob("*.part")]:
        os.unlink(part)
