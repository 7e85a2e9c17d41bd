"""A job's output folder: the job's specification, and who may write there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
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
FILES = "files"  # in it, beside the spec: the models', see specmm.zoo.model_files
PROGRAMS = "programs.json"  # see programs.py
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

    ``left``: how many items one worker is to make, by method (None: the job's own).
    """

    folder: Path
    spec: Spec
    limits: Limits = Limits()
    left: Mapping[str | None, int] = field(default_factory=dict)

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


@contextmanager
def occupied(journals: Path, rank: str = "") -> Iterator[None]:
    """Context that keeps other processes out of the folder of ``journals``, but for those of the
    same job that have another ``rank``.

    Raises ``ValueError`` when another one works there.
    """
    mode, rivals = (SHARED, "lock.lease") if rank else (ALONE, "*.lease")
    own = held(journals / f"{rank}.lock", ALONE | NOW) if rank else nullcontext()
    with held(journals / "lock", mode | NOW, rivals), own:
        yield


def remove_parts(folder: Path) -> None:
    """Remove files that a killed process was writing; only while no other process writes here.

    Object storage has none.
    """
    if isinstance(folder, Path):
        own = [(folder / name).rglob("*.part") for name in (JOURNALS, RESULTS, ARCHIVES)]
        for part in chain(folder.glob("*.part"), *own):
            part.unlink()
