"""``specmm batch --status``, ``--verify`` and ``--repair``: how far a job is, and whether its
folder holds every item exactly once, and whole. Any machine that sees the folder may ask.
"""

from __future__ import annotations

import hashlib
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmm.image_ar.records import Record
from specmm.jobs.finish import members
from specmm.jobs.folder import ARCHIVES, ITEMS, JOB, JOURNALS, RESULTS, alone, decided, read_spec
from specmm.jobs.items import Item, digests_of
from specmm.jobs.journal import Ledger
from specmm.jobs.results import files_of, place_of_name
from specmm.loading.files import files_in, make_folder, write_whole

LATELY = 600.0  # seconds whose results give the rate


def status(folder: Path) -> dict[str, Any]:
    """The numbers of items, of those done and set aside, the recent results a second, the seconds
    since the last result, and the seconds left at that rate (None: no recent results).

    Raises ``ValueError`` where ``folder`` has no job.
    """
    spec = read_spec(folder)
    known = Ledger(folder / JOURNALS)
    done = known.count_done()
    items = max(decided(folder).get(ITEMS, 0), len(known))
    now = time.time()
    lately = known.since(now - LATELY)
    rate = sum(count / max(now - first, 1.0) for count, first, _ in lately)
    last = max((moment for _, _, moment in known.since(0)), default=None)
    return {
        "model": spec.model,
        "method": spec.method,
        "items": items,
        "done": done,
        "failed": len(known) - done,
        "left": (left := items - len(known)),
        "rate": rate,
        "workers": len(lately),
        "seconds_since_last": None if last is None else now - last,
        "seconds_left": left / rate if rate else None,
    }


@dataclass
class Findings:
    """Counts, and sentences about what is wrong."""

    items: int
    done: int = 0
    failed: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)


def verify(folder: Path, items: Sequence[Item]) -> Findings:
    """Read every result in ``folder`` and compare it with the journal and the job's ``items``."""
    known = Ledger(folder / JOURNALS)
    findings = Findings(len(items))
    sums = _sums(folder, findings.problems)
    for item in items:
        if not known.is_done(item.id):
            findings.failed += item.id in known
            findings.left += item.id not in known
            continue
        findings.done += 1
        record = known[item.id]
        problem = _problem(record, sums)
        if not problem and record["item"] != item.digest:
            problem = "was made from other fields than the job file has now"
        problem = problem or _exchanged(item, record)
        findings.problems += [f"{item.id}: {problem}"] if problem else []
    there = {item.id for item in items}
    findings.problems += [f"{name}: is not in the job file" for name in known if name not in there]
    for name in sums:
        part = name.endswith(".part")
        what = "was never finished; the next run removes it" if part else "belongs to no item"
        findings.problems.append(f"{name}: {what}")
    return findings


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
    to_make = {item.id: damaged[item.id] for item in items if item.id in damaged}
    for item in items:
        if item.id in to_make and (problem := _exchanged(item, to_make[item.id])):
            raise ValueError(
                f"item {item.id!r} cannot be made again: {problem}; put the file back, or give "
                "the item a new id"
            )
    return to_make


def outcome_of_repair(folder: Path, before: Mapping[str, Record]) -> dict[str, int]:
    """How many of the results with the records ``before`` were made again, and for how many the
    bytes differ.
    """
    now = Ledger(folder / JOURNALS)
    other = [name for name, was in before.items() if _sums_in(now[name]) != _sums_in(was)]
    return {"repaired": len(before), "repaired_otherwise": len(other)}


def _unpack_torn(folder: Path) -> None:
    """Take results out of archives that cannot be read to their end; remove those archives.

    Their remaining results then count as missing.
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


def _sums_in(record: Record) -> list[str | None]:
    """The SHA-256 of each file of a ``record``; None for an item that is not done."""
    return [file.get("sha256") for file in files_of(record)]


def _sums(folder: Path, problems: list[str]) -> dict[str, str]:
    """The SHA-256 of every result by its path in ``folder``, inside archives or not; broken
    archives are added to ``problems``.
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
    """How a picture or video of ``item`` has changed since its result was made; "" if none has."""
    names = (*item.images, *item.videos)
    for name, was, now in zip(names, record.get("inputs", ()), digests_of(item), strict=False):
        if was and was != now:
            return f"its {name} is gone" if not now else f"its {name} is another file than it was"
    return ""
