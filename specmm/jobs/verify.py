"""``specmm batch --verify`` and ``--repair``: whether a folder holds every item of a job exactly
once, and whole.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmm.image_ar.records import Record, read_record
from specmm.jobs.finish import members
from specmm.jobs.folder import ARCHIVES, JOB, JOURNALS, RESULTS, Ledger, alone
from specmm.jobs.items import Item, digests_of
from specmm.jobs.results import files_of
from specmm.loading.files import files_in, make_folder, write_whole


@dataclass
class Findings:
    """Counts, and sentences about what is wrong."""

    items: int
    done: int = 0
    failed: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The findings for JSON."""
        return dict(vars(self))


def verify(folder: Path, items: Sequence[Item]) -> Findings:
    """Read every result in ``folder`` and compare it with the journal and the job's ``items``."""
    known = Ledger(folder / JOURNALS)
    found = Findings(len(items))
    files = _files(folder)
    packed = _packed(folder, found.problems)
    for item in items:
        if item.id not in known:
            found.left += 1
            continue
        if not known.is_done(item.id):
            found.failed += 1
            continue
        found.done += 1
        record = known[item.id]
        problem = _problem(record, files, packed)
        if not problem and record["item"] != item.digest:
            problem = "was made from other fields than the job file has now"
        problem = problem or exchanged(item, record)
        found.problems += [f"{item.id}: {problem}"] if problem else []
    there = {item.id for item in items}
    found.problems += [f"{name}: is not in the job file" for name in known if name not in there]
    for name in (*files, *packed):
        part = name.endswith(".part") and name in files
        what = "was never finished; the next run removes it" if part else "belongs to no item"
        found.problems.append(f"{name}: {what}")
    return found


def exchanged(item: Item, record: Record) -> str:
    """What became of a picture or video that the result of ``item`` was made from; "" if it is as
    it was.
    """
    names = (*item.images, *item.videos)
    for name, was, now in zip(names, record.get("inputs", ()), digests_of(item), strict=False):
        if was and was != now:
            return f"its {name} is gone" if not now else f"its {name} is another file than it was"
    return ""


def damage(folder: Path) -> dict[str, str]:
    """Problems by id: results that are missing or differ from the bytes that were written."""
    files = _files(folder)
    packed = _packed(folder, [])
    done = {i: r for i, r in Ledger(folder / JOURNALS).items() if r["state"] == "done"}
    problems = {identity: _problem(record, files, packed) for identity, record in done.items()}
    return {identity: problem for identity, problem in problems.items() if problem}


def check_whole(source: Path) -> None:
    """Raise ``ValueError`` when ``source`` lies in, or is, a job's output that is damaged."""
    for folder in (source, *source.parents[:2]):
        if (folder / JOB).is_file() and (folder / JOURNALS).is_dir():
            if found := damage(folder):
                identity, problem = next(iter(found.items()))
                raise ValueError(
                    f"{folder} has {len(found)} damaged or missing results, such as {identity}: "
                    f"{problem}; make them again with specmm batch JOBS --out {folder} "
                    "--repair"
                )
            return


def unpack_torn(folder: Path) -> None:
    """Take whole results out of archives that cannot be read to their end; remove those archives.

    Their other results are missing then, and a repair makes them again.
    """
    with alone(folder):
        done = [r for r in Ledger(folder / JOURNALS).values() if r["state"] == "done"]
        known = {Path(each["file"]).name: each for r in done for each in files_of(r)}
        for file in sorted((folder / ARCHIVES).glob("*.tar")):
            found: dict[str, bytes] = {}
            try:
                for name, data in members(file):
                    found[name] = data
            except (tarfile.TarError, OSError):
                for name, data in found.items():
                    if name in known and hashlib.sha256(data).hexdigest() == known[name]["sha256"]:
                        place = folder / known[name]["file"]
                        make_folder(place.parent)
                        write_whole(place, data, durable=True)
                file.unlink()


def _files(folder: Path) -> dict[str, Path]:
    """Loose results by their path in ``folder``."""
    return {str(file.relative_to(folder)): file for file in files_in(folder / RESULTS)}


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
    """A result's problem, "" if it has none; removes its entries from ``files`` or ``packed``."""
    found = [_problem_of(each, record["id"], files, packed) for each in files_of(record)]
    return next(filter(None, found), "")


def _problem_of(
    record: Record, identity: str, files: dict[str, Path], packed: dict[str, bytes]
) -> str:
    """The problem of one file of the item called ``identity``; see :func:`_problem`."""
    place = record["file"]
    data = packed.pop(Path(place).name, None)
    if file := files.pop(place, None):
        data = file.read_bytes()
    if data is None:
        return f"{place} is missing"
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        return f"{place} holds other bytes than were written"
    if place.endswith(".json"):
        return ""
    named = read_record(io.BytesIO(data)).get("id")
    return "" if named == identity else f"{place} says it is {named!r}"
