"""Pictures of your own for a drafter of image tokens: a folder with a folder for each class.

Shape letters: M pictures, R pixels a side.
"""

from __future__ import annotations

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
        (f, folder.name)
        for folder in folders
        for f in sorted(folder.rglob("*"))
        if f.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise ValueError(
            f"data must be a folder with a folder of pictures for each class, got none in {root}"
        )
    labels = class_ids([name for _, name in files], names, count)
    images = [np.asarray(ImageOps.fit(open_image(file), (side, side))) for file, _ in files]
    return Pictures(np.stack(images), np.array(labels))
