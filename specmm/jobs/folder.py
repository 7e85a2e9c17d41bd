"""A job's output folder: the job's specification, and who may write there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

from specmm.choose.when_compiled import Compiled, check_compiled
from specmm.extending.registry import unknown
from specmm.image_ar.records import FORMATS
from specmm.jobs.journal import read_journals
from specmm.jobs.locks import ALONE, NOW, SHARED, held
from specmm.loading.checkpoints import read_json
from specmm.loading.files import make_folder, sync_folder, write_whole
from specmm.zoo.model_files import check_files

JOB = "job.json"
FILES, ITEMS = "files", "items"  # job.json's other entries: the models' files, the number of items
RESULTS = "results"
JOURNALS = "journal"
ARCHIVES = "archives"
LAYOUTS = ("folders", "tar")


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
    """The job in an output ``folder``, whose results are made by ``spec``.

    ``kinds`` are the kinds of its items. ``left`` is the number of items that one worker will make,
    by method (None: the job's own), if compiling depends on it.
    """

    folder: Path
    spec: Spec
    limits: Limits = Limits()
    kinds: frozenset[str] = frozenset()
    left: Mapping[str | None, int] = field(default_factory=dict)

    @property
    def journals(self) -> Path:
        """The folder of the journals."""
        return self.folder / JOURNALS


def alone(folder: Path) -> AbstractContextManager[None]:
    """Context that waits until no other process prepares or finishes the job in ``folder``."""
    return held(folder / JOURNALS / "folder.lock", ALONE)


def decided(folder: Path) -> dict[str, Any]:
    """The initial settings of the job in ``folder``; empty if there is no job."""
    file = folder / JOB
    return read_json(file) if file.exists() else {}


@contextmanager
def deciding(folder: Path) -> Iterator[dict[str, Any]]:
    """Context with ``decided(folder)`` under a lock. Changes that the block makes are written at
    its end, so that the first of several processes decides.
    """
    with alone(folder):
        settings = decided(folder)
        before = json.dumps(settings)
        yield settings
        if json.dumps(settings) != before:
            text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
            write_whole(folder / JOB, text.encode(), durable=True)
            sync_folder(folder)


def prepare(
    folder: Path, spec: Spec, files: Mapping[str, str] | None = None, items: int = 0
) -> None:
    """Make the output ``folder``, or check that the results in it are of the same job.

    ``files``: digests of its models' files, by :mod:`specmm.zoo.model_files`. ``items``: how many
    it has now. Raises ``ValueError`` naming the differences.
    """
    for name in (JOURNALS, RESULTS, *([ARCHIVES] if spec.layout == "tar" else [])):
        make_folder(folder / name)
    asked = {**json.loads(json.dumps(asdict(spec))), FILES: dict(files or {})}
    with deciding(folder) as settings:
        if not any(True for _ in read_journals(folder / JOURNALS)):
            if any(settings.get(name) != value for name, value in asked.items()):
                settings.clear()  # another job, which made nothing
            settings.update(asked)
        check_files(folder, settings.get(FILES, {}), asked.pop(FILES))
        changed = [
            f"{k} {settings.get(k)!r} and not {v!r}"
            for k, v in asked.items()
            if settings.get(k) != v
        ]
        if changed:
            raise ValueError(
                f"{folder} holds a job with {', '.join(changed)}; "
                "give the same options or another --out"
            )
        settings[ITEMS] = items


def read_spec(folder: Path) -> Spec:
    """The spec of the job in ``folder``; raises ``ValueError`` when there is none."""
    settings = decided(folder)
    if not settings:
        raise ValueError(f"{folder} must be the output of specmm batch, got a folder without {JOB}")
    known = {each.name: settings[each.name] for each in fields(Spec) if each.name in settings}
    return Spec(**{**known, "options": tuple(known.get("options", ()))})


@contextmanager
def occupied(journals: Path, rank: str = "") -> Iterator[None]:
    """Context that keeps other processes out of the folder of ``journals``, except processes of the
    same job with another ``rank``.

    Raises ``ValueError`` when another one works there.
    """
    mode, rivals = (SHARED, "lock.lease") if rank else (ALONE, "*.lease")
    own_lock = held(journals / f"{rank}.lock", ALONE | NOW) if rank else nullcontext()
    with held(journals / "lock", mode | NOW, rivals), own_lock:
        yield


def remove_parts(folder: Path) -> None:
    """Remove files that a killed process was writing; only while no other process writes here.

    Object storage has none.
    """
    if isinstance(folder, Path):
        below = [(folder / name).rglob("*.part") for name in (JOURNALS, RESULTS, ARCHIVES)]
        for part in chain(folder.glob("*.part"), *below):
            part.unlink()
