"""easy-VQA (PyPI ``easy-vqa``, MIT): pictures of one shape, questions with thirteen answers, its
own split.

Shapes: a picture is [R, R, 3] uint8, enlarged from the package's 64 pixels as the processor does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.scenes.kinds import SHAPES
from recipes.scenes.questions import Turn
from recipes.scenes.scenes import R
from recipes.scenes.sprites import Array


@dataclass(frozen=True)
class Example:
    """A picture with all its questions."""

    image: Array
    turns: tuple[Turn, ...]


def load_easy(split: str = "train") -> list[Example]:
    """Pictures and questions of ``split``, train or test.

    Raises ``ValueError`` when the package is missing or the split is another.
    """
    found = find_spec("easy_vqa")
    if found is None or found.origin is None:
        raise ValueError("easy-VQA is not installed, run: pip install easy-vqa")
    folder = Path(found.origin).parent / "data" / split
    if not folder.is_dir():
        raise ValueError(f"split must be train or test, got {split!r}")
    return list(read_easy(folder))


def read_easy(folder: Path) -> Iterator[Example]:
    """Read ``questions.json`` and ``images/NUMBER.png`` of one split, in the order of the pictures'
    numbers.
    """
    turns: dict[int, list[Turn]] = {}
    for question, answer, picture in json.loads((folder / "questions.json").read_text()):
        turns.setdefault(picture, []).append(Turn(question, answer, f"easy {_sort(answer)}"))
    for picture, asked in sorted(turns.items()):
        image = Image.open(folder / f"images/{picture}.png").convert("RGB")
        yield Example(np.asarray(image.resize((R, R), Image.Resampling.BICUBIC)), tuple(asked))


def _sort(answer: str) -> str:
    if answer in ("yes", "no"):
        return "yes/no"
    return "shape" if answer in SHAPES else "colour"
