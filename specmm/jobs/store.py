"""Where results lie: one file an item, its place told by its id alone, written whole.

``OUT/results/3f/heart-0001-3fa2b1c4d5e6.png``: two digits of the id's hash spread any number of
items over 256 folders.

Shape letters: none.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmm.files import slug, sync_folder, write_whole
from specmm.jobs.items import Item

RESULTS, JOURNALS, ARCHIVES = "results", "journal", "archives"
FORMATS = {"png": "PNG", "webp": "WEBP", "jpeg": "JPEG"}
DESCRIPTION = 0x010E  # EXIF ImageDescription


@dataclass
class Result:
    """What came of an item: an ``image`` (PIL) or an ``answer``, and ``facts`` about the run for
    the index.
    """

    item: Item
    facts: dict[str, Any]
    image: Any = None
    answer: str | None = None


def name_of(item: Item) -> str:
    """The name of the item's file without suffix: readable, and different for different ids."""
    return f"{slug(item.id.replace('.', '-'))}-{_hash(item)[:12]}"


def place_of(item: Item, suffix: str) -> str:
    """The item's file below the output folder."""
    return f"{RESULTS}/{_hash(item)[:2]}/{name_of(item)}.{suffix}"


def _hash(item: Item) -> str:
    return hashlib.sha256(item.id.encode()).hexdigest()


def described(item: Item, model: str, facts: dict[str, Any]) -> dict[str, Any]:
    """What is written into a picture: whatever stays the same when the item is made again, in
    whatever batch.
    """
    certificate = {
        k: v for k, v in facts["certificate"].items() if k != "tv"
    }  # measured on the whole batch
    return {
        "id": item.id,
        item.kind: item.text,
        "seed": item.seed,
        "model": model,
        "method": facts["method"],
    } | {"certificate": certificate}


def encode(result: Result, kind: str, model: str) -> bytes:
    """The bytes of the item's file: a picture of format ``kind`` with its description inside, or
    JSON.
    """
    about = json.dumps(described(result.item, model, result.facts), ensure_ascii=True)
    if result.image is None:
        return (
            json.dumps({**json.loads(about), "answer": result.answer}, ensure_ascii=False) + "\n"
        ).encode()
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    extra: dict[str, Any] = (
        {"quality": 95} if kind == "jpeg" else {"lossless": True} if kind == "webp" else {}
    )
    if kind == "png":
        extra["pnginfo"] = PngInfo()
        extra["pnginfo"].add_text("specmm", about)
    else:
        extra["exif"] = Image.Exif()
        extra["exif"][DESCRIPTION] = about
    packed = io.BytesIO()
    result.image.save(packed, format=FORMATS[kind], **extra)
    return packed.getvalue()


def description(file: Any) -> dict[str, Any]:
    """What ``encode`` wrote into a picture's ``file``, or {} where there is nothing."""
    from PIL import Image

    with Image.open(file) as image:
        text = image.info.get("specmm") or image.getexif().get(DESCRIPTION) or "{}"
    found: dict[str, Any] = json.loads(text)
    return found


class Store:
    """Writes results below ``folder``; raises ``OSError`` when the disk will not take them."""

    def __init__(self, folder: Path, kind: str, model: str) -> None:
        self.folder, self.kind, self.model = folder, kind, model

    def save(self, results: Iterable[Result]) -> list[dict[str, Any]]:
        """Write the files of ``results`` and return what the journal shall say, once all of them
        are on the disk.
        """
        records, touched = [], set()
        for result in results:
            place = place_of(result.item, "json" if result.image is None else self.kind)
            data, file = encode(result, self.kind, self.model), self.folder / place
            if not file.parent.exists():
                file.parent.mkdir(exist_ok=True)
                touched.add(file.parent.parent)
            write_whole(file, data, durable=True)
            touched.add(file.parent)
            records.append(_done(result, place, data))
        for each in touched:
            sync_folder(each)
        return records


def _done(result: Result, place: str, data: bytes) -> dict[str, Any]:
    item, answer = result.item, {} if result.answer is None else {"answer": result.answer}
    return {
        "id": item.id,
        "state": "done",
        "at": time.time(),
        "item": item.digest,
        item.kind: item.text,
        "seed": item.seed,
        "file": place,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        **answer,
        **result.facts,
    }


def remove_parts(folder: Path) -> None:
    """Remove what a killed process was in the middle of writing; only while no other process writes
    here.
    """
    for part in (
        *folder.glob("*.part"),
        *(folder / RESULTS).rglob("*.part"),
        *(folder / ARCHIVES).glob("*.part"),
    ):
        os.unlink(part)
