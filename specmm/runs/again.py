"""``specmm generate --like FILE``: a picture drawn again from what its file records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from specmm.image_ar.records import (
    FORMATS,
    MODELS,
    checked_record,
    differences,
    draw_again,
    picture_file,
)
from specmm.loading.files import write_whole
from specmm.loading.hardware import Place
from specmm.runs.run import open_model
from specmm.zoo.model_files import digest_of_models


@dataclass
class Again:
    """A picture ``drawn`` again from ``like``, whether their pixels are ``equal``, and what is
    another here than it was.
    """

    like: Path
    drawn: Path
    equal: bool
    differences: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        paths = {"like": str(self.like), "outputs": [str(self.drawn)]}
        return {**paths, "equal": self.equal, "differences": self.differences}

    def __str__(self) -> str:
        """A line for people."""
        same = "equal, bit for bit"
        if not self.equal:
            same = f"not equal to it: {'; '.join(self.differences) or 'nothing else differs'}"
        return f"{self.like} drawn again: {same}, in {self.drawn}"


def draw_like(
    file: Path, out: Path, model: str | None = None, tell: Callable[[str], None] = print
) -> Again:
    """Draw the picture in ``file`` again, into the folder ``out``, by its ``model``, which may lie
    elsewhere now. ``tell`` is called with what is another here than it was.

    Raises ``ValueError`` for a file without a record or with an edited one, another model, and a
    device that is not here. Nothing is written over.
    """
    record = checked_record(file)
    with Image.open(file) as opened:
        kind = {name: kind for kind, name in FORMATS.items()}[str(opened.format)]
        wanted = np.asarray(opened.convert("RGB"))
    drawn = out / file.name
    if drawn.exists():
        raise ValueError(f"{drawn} is there already; choose another --out")
    names = {name: record.get(name) for name in MODELS}
    if model is not None:
        names["model"] = model
        if digest_of_models(filter(None, names.values())) != record["files"]:
            raise ValueError(
                f"{file} was drawn by {record['model']}, whose files are others than those of "
                f"{model}; leave the model out, or give that one"
            )
    place = Place.named(record["device"], getattr(torch, record["dtype"]))
    pipe = open_model("images", str(names.pop("model")), place, **names)
    found = differences(record, pipe)
    for line in found:
        tell(f"note: {line}, so bits may differ")
    data = picture_file(draw_again(record, pipe), kind, record)
    write_whole(drawn, data)
    with Image.open(drawn) as opened:
        equal = np.array_equal(np.asarray(opened.convert("RGB")), wanted)
    return Again(file, drawn, equal, found)
