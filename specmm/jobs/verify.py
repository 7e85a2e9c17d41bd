"""``specmm batch --verify`` and ``--repair``: whether a folder holds every item of a job exactly
once, and whole.

Shape letters: none.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmm.files import write_whole
from specmm.jobs.finish import members
from specmm.jobs.items import Item
from specmm.jobs.journal import Record, ledger
from specmm.jobs.spec import FILE, alone
from specmm.jobs.store import ARCHIVES, JOURNALS, RESULTS, description


@dataclass
class Findings:
    """Counts, and sentences about what is wrong."""

    items: int
    done: int = 0
    failed: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def verify(folder: Path, items: Sequence[Item]) -> Findings:
    """Read every result in ``folder`` and compare it with the journal and the job's ``items``."""
    known, found = ledger(folder / JOURNALS), Findings(len(items))
    files, packed = _files(folder), _packed(folder, found.problems)
    for item in items:
        record = known.pop(item.id, None)
        if record is None:
            found.left += 1
        elif record["state"] == "failed":
            found.failed += 1
        else:
            found.done += 1
            changed = (
                "was made from other fields than the job file has now"
                if record["item"] != item.digest
                else ""
            )
            problem = _problem(record, files, packed) or changed
            found.problems += [f"{item.id}: {problem}"] if problem else []
    found.problems += [f"{identity}: is not in the job file" for identity in known]
    found.problems += [
        f"{name}: belongs to no item" for name in (*files, *packed) if not name.endswith(".part")
    ]
    found.problems += [
        f"{name}: was never finished; the next run removes it"
        for name in files
        if name[-5:] == ".part"
    ]
    return found


@dataclass(frozen=True)
class Damage:
    """A result that is not what the journal says: what is wrong, and the bytes' hash that it had."""

    problem: str
    sha256: str


def damage(folder: Path) -> dict[str, Damage]:
    """The results in ``folder`` that are missing or hold other bytes than were written, by the
    item's id.
    """
    files, packed, found = _files(folder), _packed(folder, []), {}
    for identity, record in ledger(folder / JOURNALS).items():
        if record["state"] == "done" and (problem := _problem(record, files, packed)):
            found[identity] = Damage(problem, record["sha256"])
    return found


def check_whole(source: Path) -> None:
    """Raise ``ValueError`` when ``source`` is, or lies in, a job's output with a damaged or missing
    result.
    """
    for folder in (source, *source.parents[:2]):
        if (folder / FILE).is_file() and (folder / JOURNALS).is_dir():
            if found := damage(folder):
                identity, first = next(iter(found.items()))
                raise ValueError(
                    f"{folder} has {len(found)} damaged or missing results, such as {identity}: {first.problem}; "
                    f"make them again with specmm batch JOBS --out {folder} --repair"
                )
            return


def unpack_torn(folder: Path) -> None:
    """Take the whole results out of archives that cannot be read to their end, and remove those
    archives.

    Their other results are missing then, and a repair makes them again.
    """
    with alone(folder):
        known = {
            Path(r["file"]).name: r
            for r in ledger(folder / JOURNALS).values()
            if r["state"] == "done"
        }
        for file in sorted((folder / ARCHIVES).glob("*.tar")):
            try:
                found = dict(members(file))
            except (tarfile.TarError, OSError):
                found = dict(_readable(file))
                for name, data in found.items():
                    if name in known and hashlib.sha256(data).hexdigest() == known[name]["sha256"]:
                        place = folder / known[name]["file"]
                        place.parent.mkdir(parents=True, exist_ok=True)
                        write_whole(place, data, durable=True)
                os.unlink(file)


def _readable(file: Path) -> Iterator[tuple[str, bytes]]:
    """The members before the place where an archive is torn."""
    try:
        yield from members(file)
    except (tarfile.TarError, OSError):
        return


def _files(folder: Path) -> dict[str, Path]:
    return {
        f"{RESULTS}/{f.relative_to(folder / RESULTS)}": f
        for f in (folder / RESULTS).rglob("*")
        if f.is_file()
    }


def _packed(folder: Path, problems: list[str]) -> dict[str, bytes]:
    """The members of all archives; a damaged archive is one of the ``problems``."""
    packed: dict[str, bytes] = {}
    for file in sorted((folder / ARCHIVES).glob("*.tar")):
        try:
            for name, data in members(file):
                if name in packed:
                    problems.append(f"{file.name}: {name} is in two archives")
                packed[name] = data
        except (tarfile.TarError, OSError) as error:
            problems.append(f"{file.name}: is no whole archive ({error})")
    return packed


def _problem(record: Record, files: dict[str, Path], packed: dict[str, bytes]) -> str:
    """What is wrong with a result, "" if nothing; takes it out of ``files`` or ``packed``."""
    place, name = record["file"], Path(record["file"]).name
    data = packed.pop(name, None)
    file = files.pop(place, None)
    data = file.read_bytes() if file is not None else data
    if data is None:
        return f"{place} is missing"
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        return f"{place} holds other bytes than were written"
    if place.endswith(".json"):
        return ""
    told = description(io.BytesIO(data))
    return "" if told.get("id") == record["id"] else f"{place} says it is {told.get('id')!r}"
