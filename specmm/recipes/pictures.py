"""Pictures as training data: a folder for each class, and their encoded forms.

Shape letters: B batch, M pictures, R pixels a side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import trange

from specmm.image_ar.calls import class_ids
from specmm.metrics.inputs import open_pictures

log = logging.getLogger(__name__)
CLASS_DROPOUT = 0.1  # share of samples trained as "no class", which guidance needs


@dataclass(frozen=True)
class Pictures:
    """``images`` [M, R, R, 3] uint8 and ``labels`` [M]; without images the target draws some."""

    images: npt.NDArray[Any] | None
    labels: npt.NDArray[Any]


def pictures(place: str, names: Sequence[str], count: int, side: int) -> Pictures:
    """The pictures in ``place``, cut to squares of ``side`` pixels. Folders have the names of a
    model's ``count`` classes (``names``, or ids). Without a place: every class once, and no
    pictures.

    Raises ``ValueError`` for a folder that is no class, for a file that is no picture, and if there
    are no pictures.
    """
    if not place:
        return Pictures(None, np.arange(count))
    root = Path(place).expanduser()
    opened = open_pictures(root)
    folders = [file.path.relative_to(root).parts[:-1] for file in opened.files]
    if not all(folders):
        raise ValueError(
            "data must be a folder with a folder of pictures for each class, got "
            f"{opened.files[folders.index(())]} in none"
        )
    if opened.left_out:
        log.warning("data in %s: %s", root, opened.counts())
    labels = class_ids([folder[0] for folder in folders], names, count)
    images = [np.asarray(ImageOps.fit(Image.fromarray(p), (side, side))) for p in opened]
    return Pictures(np.stack(images), np.array(labels))


def to_float(images: Tensor) -> Tensor:
    """Pictures [B, R, R, 3] uint8 -> [B, 3, R, R] float in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def encode_views(encode: Callable[[Tensor], Tensor], images: Tensor, batch: int = 64) -> Tensor:
    """Encodings [M, 2, ...] of pictures [M, R, R, 3] uint8 and their mirror images."""
    rows = []
    for first in trange(0, len(images), batch, desc="encode", mininterval=5):
        x = to_float(images[first : first + batch])
        rows.append(torch.stack([encode(view) for view in (x, x.flip(-1))], dim=1))
    return torch.cat(rows)
