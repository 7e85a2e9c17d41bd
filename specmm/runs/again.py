"""``specmm generate --like FILE``: a picture drawn again from what its file records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from specmm.choose.threads import settled
from specmm.image_ar.records import (
    FORMATS,
    MODELS,
    OWN,
    SUM,
    Record,
    picture_file,
    processor,
    read_record,
    sum_of,
    versions,
)
from specmm.loading.files import write_whole
from specmm.loading.hardware import Place
from specmm.programs.batch_invariant import batch_invariant
from specmm.runs.run import open_model, parse_methods
from specmm.zoo.model_files import digest_of_models

if TYPE_CHECKING:
    from specmm.runs.run import Images


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


def checked_record(file: Path) -> Record:
    """The record of a picture, for drawing it again.

    Raises ``ValueError`` for a file without one, one that was edited, and what is no picture.
    """
    try:
        record = read_record(file)
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{file} must be a picture that specmm saved, got: {error}") from None
    if not isinstance(record, dict) or SUM not in record:
        raise ValueError(f"{file} must be a picture that specmm saved, got one without a record")
    if not record.keys() & {"class", "prompt"}:
        raise ValueError(
            f"{file} must be a picture of a class or prompt, got an answer's: ask again"
        )
    if record[SUM] != sum_of(record):
        raise ValueError(
            f"the record in {file} was edited since: it does not say what the picture was drawn "
            "from; give its seed, class and options to specmm generate yourself"
        )
    return record


def differences(record: Record, pipe: Images) -> list[str]:
    """What is another here than it was for ``record``, as sentences; its bits may be, too."""
    then = {**record["versions"], "the processor": record["processor"]}
    here = {**versions(), "the processor": processor(pipe.device)}
    found = [
        f"{name} was {then.get(name)} and is {now}"
        for name, now in here.items()
        if then.get(name) != now
    ]
    if record["files"] != pipe.files:
        found.append(f"the files of {record['model']} are others than they were")
    return found


def draw_again(record: Record, pipe: Images) -> Image.Image:
    """The picture of ``record`` by ``pipe``, opened in its dtype on its device."""
    one = {name: record[name] for name in OWN if name in record}
    asked = record.get("batch") or [one] * (record.get("rows", 1) if record["compiled"] else 1)
    kind = "class" if "class" in record else "prompt"
    given: dict[str, Any] = {pipe.takes: [one[kind] for one in asked]}
    if any("negative_prompt" in one for one in asked):
        given["negative_prompt"] = [one.get("negative_prompt", "") for one in asked]
    method = parse_methods(pipe.registry, record["method"])[0]
    seeds = [one["seed"] for one in asked]
    invariant = batch_invariant() if record["batch_invariant"] else nullcontext()
    with settled(pipe.transformer, record["threads"]), invariant:
        out = pipe(
            **given,
            **record["options"],
            seed=seeds[0] if method.one_generator else seeds,
            method=method,
            batch_size=record.get("rows", 1),
            compiled=record["compiled"],
        )
    image: Image.Image = out.images[record.get("place", 0)]
    return image
