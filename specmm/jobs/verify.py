"""``specmm batch --verify``: whether an output folder holds every item of a job exactly once, and whole.

Shape letters: none.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmm.jobs.finish import members
from specmm.jobs.items import Item
from specmm.jobs.journal import Record, ledger
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
    files, packed = _files(folder), _packed(folder, found)
    for item in items:
        record = known.pop(item.id, None)
        if record is None:
            found.left += 1
        elif record["state"] == "failed":
            found.failed += 1
        else:
            found.done += 1
            problem = _problem(item, record, files, packed)
            found.problems += [f"{item.id}: {problem}"] if problem else []
    found.problems += [f"{identity}: is not in the job file" for identity in known]
    found.problems += [f"{name}: belongs to no item" for name in (*files, *packed) if not name.endswith(".part")]
    found.problems += [f"{name}: was never finished; the next run removes it" for name in files if name[-5:] == ".part"]
    return found


def _files(folder: Path) -> dict[str, Path]:
    return {f"{RESULTS}/{f.relative_to(folder / RESULTS)}": f for f in (folder / RESULTS).rglob("*") if f.is_file()}


def _packed(folder: Path, found: Findings) -> dict[str, bytes]:
    """The members of all archives; a damaged archive is a problem."""
    packed: dict[str, bytes] = {}
    for file in sorted((folder / ARCHIVES).glob("*.tar")):
        try:
            for name, data in members(file):
                if name in packed:
                    found.problems.append(f"{file.name}: {name} is in two archives")
                packed[name] = data
        except (tarfile.TarError, OSError) as error:
            found.problems.append(f"{file.name}: is no whole archive ({error})")
    return packed


def _problem(item: Item, record: Record, files: dict[str, Path], packed: dict[str, bytes]) -> str:
    """What is wrong with a result, "" if nothing; takes it out of ``files`` or ``packed``."""
    place, name = record["file"], Path(record["file"]).name
    data = packed.pop(name, None)
    file = files.pop(place, None)
    if record["item"] != item.digest:
        return "was made from other fields than the job file has now"
    data = file.read_bytes() if file is not None else data
    if data is None:
        return f"{place} is missing"
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        return f"{place} holds other bytes than were written"
    if place.endswith(".json"):
        return ""
    told = description(io.BytesIO(data))
    return "" if told.get("id") == item.id else f"{place} says it is {told.get('id')!r}"
