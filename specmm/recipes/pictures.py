"""Pictures of your own for a drafter of image tokens: a folder with a folder for each class, or
with a ``metadata.jsonl`` that names files and what they show.

Shape letters: M pictures, R pixels a side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ImageOps

from specmm.image_ar.calls import class_ids
from specmm.metrics.inputs import SUFFIXES
from specmm.vlm.pictures import open_image

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Pictures:
    """``images`` [M, R, R, 3] uint8 and ``labels`` [M], or labels alone, of which the target draws
    its own.
    """

    images: npt.NDArray[Any] | None
    labels: npt.NDArray[Any]


def pictures(place: str, names: Sequence[str], count: int, side: int) -> Pictures:
    """Those in ``place``, cut to squares of ``side`` pixels, whose folders are called as the
    ``count`` classes of a model are (``names``, or ids); without a place every class once and no
    pictures.

    Raises ``ValueError`` for a folder that is no class, for a file that is no picture, and where
    there is none.
    """
    if not place:
        return Pictures(None, np.arange(count))
    root = Path(place).expanduser()
    folders = sorted(folder for folder in root.glob("*") if folder.is_dir())
    files = [
        (f, folder.name) for folder in folders for f in sorted(folder.rglob("*")) if _is_picture(f)
    ]
    if not files:
        raise ValueError(
            f"data must be a folder with a folder of pictures for each class, got none in {root}"
        )
    labels = class_ids([name for _, name in files], names, count)
    images = [np.asarray(ImageOps.fit(open_image(file), (side, side))) for file, _ in files]
    return Pictures(np.stack(images), np.array(labels))


def captioned(root: Path, size: tuple[int, int]) -> tuple[npt.NDArray[Any], list[str]]:
    """Pictures [M, H, W, 3] uint8 in ``root``, cut to a ``size``, and their texts: a line of its
    ``metadata.jsonl`` is ``{"file_name": …, "text": …}``, as Hugging Face's data sets have it.

    Raises ``ValueError`` where there is no such file, for other lines, and files that are no
    picture.
    """
    file = root / METADATA
    if not file.is_file():
        raise ValueError(f"data must be a folder with a {METADATA}, got none in {root}")
    images, texts = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        name, text = _described(line, f"{file}, line {number}")
        images.append(np.asarray(ImageOps.fit(open_image(root / name), size[::-1])))
        texts.append(text)
    if not images:
        raise ValueError(f"data must hold pictures, got none in {file}")
    return np.stack(images), texts


def _described(line: str, where: str) -> tuple[str, str]:
    """The file's name and its text."""
    try:
        row = json.loads(line)
        return str(row["file_name"]), str(row["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} must hold file_name and text, got {line[:60]!r}") from error


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES
