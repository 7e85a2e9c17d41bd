"""The files of a job's results, with their descriptions.

``OUT/results/3f/heart-0001-3fa2b1c4d5e6.png``: two digits of the id's hash spread any number of
items over 256 folders. Beside an answer's ``….json`` lie its pictures, ``….1.png`` and so on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from specmm.image_ar.records import Record, maker_in, picture_file
from specmm.jobs.folder import RESULTS
from specmm.jobs.items import Item
from specmm.loading.files import make_folder, slug, sync_folder, write_whole

WRITERS = 16  # files on their way to the disk at a time: it takes many in the time of one


@dataclass
class Result:
    """The result of an item, an ``image`` or an ``answer``, and ``facts`` for the index.

    ``record``: what an image was drawn from (:mod:`specmm.image_ar.records`), or what an answer was
    made by. ``pictures``: the pictures in the answer; None for a model that does not draw any.
    """

    item: Item
    facts: dict[str, Any]
    record: Record = field(default_factory=dict)
    image: Image.Image | None = None
    answer: str | None = None
    pictures: Sequence[Image.Image] | None = None


def name_of(item: Item) -> str:
    """The name of the item's file without suffix: readable, and different for different ids."""
    digits = hashlib.sha256(item.id.encode()).hexdigest()[:12]
    return f"{slug(item.id.replace('.', '-'))}-{digits}"


def place_of(item: Item, suffix: str) -> str:
    """The item's file below the output folder."""
    return place_of_name(f"{name_of(item)}.{suffix}")


def place_of_name(name: str) -> str:
    """The file called ``name`` below the output folder."""
    return f"{RESULTS}/{name.rpartition('-')[2][:2]}/{name}"


def files_of(record: Record) -> list[Record]:
    """The files of a finished item, as its ``record`` describes them: its own first, then the
    pictures of its answer.
    """
    return [record, *record.get("pictures", ())]


def encode(result: Result, kind: str) -> dict[str, bytes]:
    """The item's files by suffix: a picture of format ``kind``, or JSON and the answer's pictures.

    All hold a description, limited to facts that do not depend on the item's batch.
    """
    about = _about(result)
    if result.image is not None:
        return {kind: picture_file(result.image, kind, about)}
    files = {}
    for number, picture in enumerate(result.pictures or (), start=1):
        numbered = {**about, "picture": number}
        files[f"{number}.{kind}"] = picture_file(picture, kind, numbered)
    about["answer"] = result.answer
    if result.pictures is not None:
        about["pictures"] = [f"{name_of(result.item)}.{suffix}" for suffix in files]
    return {"json": (json.dumps(about, ensure_ascii=False) + "\n").encode(), **files}


def _about(result: Result) -> dict[str, Any]:
    """The description of a ``result``."""
    item, facts = result.item, result.facts
    # without the total variation, which is measured on the whole batch
    claim = {k: v for k, v in facts["certificate"].items() if k != "tv"}
    about = {"id": item.id, item.kind: item.text, "seed": item.seed, "method": facts["method"]}
    return about | {"certificate": claim} | result.record


def save(folder: Path, results: Iterable[Result], kind: str) -> list[Record]:
    """Write the files of ``results`` below ``folder``, pictures in format ``kind``.

    Returns their records for the journal once all files are on the disk. Raises ``OSError`` when
    the disk will not take them.
    """
    with ThreadPoolExecutor(WRITERS) as pool:
        records = list(pool.map(partial(_save, folder, kind=kind), results))
        files = [folder / file["file"] for record in records for file in files_of(record)]
        list(pool.map(sync_folder, {folder / RESULTS, *(file.parent for file in files)}))
    return records


def _save(folder: Path, result: Result, kind: str) -> Record:
    """Write the files of a ``result``; returns its record."""
    item = result.item
    own, *others = [
        _write(folder, place_of(item, suffix), data)
        for suffix, data in encode(result, kind).items()
    ]
    record = {
        "id": item.id,
        "state": "done",
        "at": time.time(),
        "item": item.digest,
        item.kind: item.text,
        "seed": item.seed,
        **own,
    }
    answer: Record = {} if result.answer is None else {"answer": result.answer}
    if result.pictures is not None:
        answer["pictures"] = others
        _remove_from(folder, item, len(others) + 1, kind)
    rest = {k: v for k, v in result.record.items() if k in ("compiled", "inputs")}
    return {**record, **answer, **result.facts, **rest, **maker_in(result.record)}


def _write(folder: Path, place: str, data: bytes) -> Record:
    """Write ``data`` to ``place`` in ``folder``; returns the file's entry for a record."""
    file = folder / place
    make_folder(file.parent)
    write_whole(file, data, durable=True)
    return {"file": place, "sha256": hashlib.sha256(data).hexdigest()}


def _remove_from(folder: Path, item: Item, number: int, kind: str) -> None:
    """Remove the pictures of an answer from ``number`` on: another machine had made more."""
    while (file := folder / place_of(item, f"{number}.{kind}")).exists():
        file.unlink()
        number += 1
