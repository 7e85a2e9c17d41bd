"""``specmm batch --verify`` and ``--repair``: whether a folder holds every item of a job exactly
once, and whole.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmm.image_ar.records import Record
from specmm.jobs.finish import members
from specmm.jobs.folder import ARCHIVES, JOB, JOURNALS, RESULTS, alone
from specmm.jobs.items import Item, digests_of
from specmm.jobs.journal import Ledger
from specmm.jobs.results import files_of, place_of_name, sums_of
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
    sums = _sums(folder, found.problems)
    for item in items:
        if not known.is_done(item.id):
            found.failed += item.id in known
            found.left += item.id not in known
            continue
        found.done += 1
        record = known[item.id]
        problem = _problem(record, sums)
        if not problem and record["item"] != item.digest:
            problem = "was made from other fields than the job file has now"
        problem = problem or _exchanged(item, record)
        found.problems += [f"{item.id}: {problem}"] if problem else []
    there = {item.id for item in items}
    found.problems += [f"{name}: is not in the job file" for name in known if name not in there]
    for name in sums:
        part = name.endswith(".part")
        what = "was never finished; the next run removes it" if part else "belongs to no item"
        found.problems.append(f"{name}: {what}")
    return found


def check_whole(source: Path) -> None:
    """Raise ``ValueError`` when ``source`` lies in, or is, a job's output that is damaged."""
    for folder in (source, *source.parents[:2]):
        if (folder / JOB).is_file() and (folder / JOURNALS).is_dir():
            if found := _damaged(folder):
                record, problem = found[0]
                raise ValueError(
                    f"{folder} has {len(found)} damaged or missing results, such as "
                    f"{record['id']}: {problem}; make them again with specmm batch JOBS --out "
                    f"{folder} --repair"
                )
            return


# ---- repair


def to_repair(folder: Path, items: Sequence[Item]) -> dict[str, Record]:
    """Records of the results of ``items`` that are damaged or missing, by id.

    Raises ``ValueError`` for one that cannot be made again.
    """
    _unpack_torn(folder)
    damaged = {record["id"]: record for record, _ in _damaged(folder)}
    found = {item.id: damaged[item.id] for item in items if item.id in damaged}
    for item in items:
        if item.id in found and (problem := _exchanged(item, found[item.id])):
            raise ValueError(
                f"item {item.id!r} cannot be made again: {problem}; put the file back, or give "
                "the item a new id"
            )
    return found


def outcome_of_repair(folder: Path, before: Mapping[str, Record]) -> dict[str, int]:
    """How many of the results that had the records ``before`` were made again, and with how many
    the bytes differ.
    """
    now = Ledger(folder / JOURNALS)
    other = [identity for identity, was in before.items() if sums_of(now[identity]) != sums_of(was)]
    return {"repaired": len(before), "repaired_otherwise": len(other)}


def _unpack_torn(folder: Path) -> None:
    """Take results out of archives that cannot be read to their end; remove those archives.

    Their other results are missing then.
    """
    with alone(folder):
        for file in sorted((folder / ARCHIVES).glob("*.tar")):
            found: list[tuple[str, bytes]] = []
            try:
                found += members(file)
            except (tarfile.TarError, OSError):
                for name, data in found:
                    place = folder / place_of_name(name)
                    make_folder(place.parent)
                    write_whole(place, data, durable=True)
                file.unlink()


def _damaged(folder: Path) -> list[tuple[Record, str]]:
    """Records of results that are missing or differ from the bytes that were written, and how."""
    sums = _sums(folder, [])
    done = (r for r in Ledger(folder / JOURNALS).values() if r["state"] == "done")
    return [(record, problem) for record in done if (problem := _problem(record, sums))]


# ---- what lies there


def _sums(folder: Path, problems: list[str]) -> dict[str, str]:
    """The SHA-256 of every result by its path in ``folder``, in an archive or not; what is wrong
    with an archive is one of the ``problems``.
    """
    sums: dict[str, str] = {}
    for file in sorted((folder / ARCHIVES).glob("*.tar")):
        try:
            for name, data in members(file):
                place = place_of_name(name)
                if place in sums:
                    problems.append(f"{file.name}: {name} is in two archives")
                sums[place] = hashlib.sha256(data).hexdigest()
        except (tarfile.TarError, OSError) as error:
            problems.append(f"{file.name}: is no whole archive ({error})")
    for file in files_in(folder / RESULTS):
        sums[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return sums


def _problem(record: Record, sums: dict[str, str]) -> str:
    """A result's problem, "" if it has none; removes its entries from ``sums``."""
    problem = ""
    for file in files_of(record):
        found = sums.pop(file["file"], None)
        if found is None:
            problem = problem or f"{file['file']} is missing"
        elif found != file["sha256"]:
            problem = problem or f"{file['file']} holds other bytes than were written"
    return problem


def _exchanged(item: Item, record: Record) -> str:
    """What became of a picture or video that the result of ``item`` was made from; "" if it is as
    it was.
    """
    names = (*item.images, *item.videos)
    for name, was, now in zip(names, record.get("inputs", ()), digests_of(item), strict=False):
        if was and was != now:
            return f"its {name} is gone" if not now else f"its {name} is another file than it was"
    return ""
