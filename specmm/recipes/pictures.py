"""Pictures of your own for a drafter of image tokens: a folder with a folder for each class.

Shape letters: M pictures, R pixels a side.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from specmm.image_ar.calls import class_ids
from specmm.metrics.inputs import open_pictures

log = logging.getLogger(__name__)


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
    given = open_pictures(root)
    folders = [file.path.relative_to(root).parts[:-1] for file in given.files]
    if not all(folders):
        raise ValueError(
            "data must be a folder with a folder of pictures for each class, got "
            f"{given.files[folders.index(())]} in none"
        )
    if given.left_out:
        log.warning("data in %s: %s", root, given.counts())
    labels = class_ids([folder[0] for folder in folders], names, count)
    images = [np.asarray(ImageOps.fit(Image.fromarray(p), (side, side))) for p in given]
    return Pictures(np.stack(images), np.array(labels))
