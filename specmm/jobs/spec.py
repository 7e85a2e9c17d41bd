"""What a job is, apart from its items: everything that its results depend on, kept beside them.

Shape letters: none.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specmm.checkpoints import read_json
from specmm.files import sync_folder, write_whole
from specmm.jobs.items import Item
from specmm.jobs.journal import read_journals
from specmm.jobs.store import ARCHIVES, FORMATS, JOURNALS, RESULTS
from specmm.registry import unknown

FILE = "job.json"
LAYOUTS = ("folders", "tar")


@dataclass(frozen=True)
class Spec:
    """How items become results. ``method`` and its ``options`` ("KEY=VALUE") are for items without
    a method.

    ``sampling`` are options of the pipeline's call; ``seed`` makes the items' own seeds from their
    ids.
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

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("format", self.format, FORMATS),
            ("layout", self.layout, LAYOUTS),
        ):
            if value not in known:
                raise unknown(kind, value, known)


@dataclass(frozen=True)
class Limits:
    """How a job is worked on, which no result depends on: ``batch`` 0 finds the size, ``retries``
    an item, ``shard`` items an archive.
    """

    batch: int = 0
    retries: int = 2
    shard: int = 1000
    device: str = "cpu"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares or finishes the job in ``folder``."""
    with (folder / JOURNALS / "folder.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(folder: Path, spec: Spec) -> None:
    """Make the output ``folder``, or check that it is of the same job, as soon as there is a result
    in it.

    Raises ``ValueError`` naming what differs.
    """
    for name in (JOURNALS, RESULTS, *([ARCHIVES] if spec.layout == "tar" else [])):
        (folder / name).mkdir(parents=True, exist_ok=True)
    with alone(folder):
        _check_in(folder, spec)


def _check_in(folder: Path, spec: Spec) -> None:
    file, wanted = folder / FILE, json.loads(json.dumps(asdict(spec)))
    if not file.exists() or not any(True for _ in read_journals(folder / JOURNALS)):
        write_whole(
            file, (json.dumps(wanted, indent=1, ensure_ascii=False) + "\n").encode(), durable=True
        )
        sync_folder(folder)
        return
    found = read_json(file)
    changed = [
        f"{k} {found.get(k)!r} and not {v!r}" for k, v in wanted.items() if found.get(k) != v
    ]
    if changed:
        raise ValueError(
            f"{folder} holds a job with {', '.join(changed)}; give the same options or another --out"
        )


def read_spec(folder: Path) -> Spec:
    """The spec of the job in ``folder``; raises ``ValueError`` when there is none."""
    if not (folder / FILE).is_file():
        raise ValueError(
            f"{folder} must be the output of specmm batch, got a folder without {FILE}"
        )
    found = read_json(folder / FILE)
    return Spec(**{**found, "options": tuple(found.get("options", ()))})


def check_same(items: Sequence[Item], known: dict[str, dict[str, Any]]) -> None:
    """Raise ``ValueError`` when an item that is done has changed in the job file since."""
    for item in items:
        record = known.get(item.id)
        if record is not None and record["state"] == "done" and record["item"] != item.digest:
            raise ValueError(
                f"item {item.id!r} is done but has changed in the job file; give it a new id or choose another --out"
            )
