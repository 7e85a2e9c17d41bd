"""``specmm generate --like FILE``: a picture drawn again from what its file records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from specmm import zoo
from specmm.choose.threads import settled
from specmm.extending.kinds import shown
from specmm.extending.registry import unknown
from specmm.image_ar.records import (
    FORMATS,
    MIXED,
    MODELS,
    OWN,
    SUM,
    Record,
    picture_file,
    processor,
    read_record,
    set_as_recorded,
    sum_of,
    versions,
)
from specmm.loading.files import sentence_of, writable, write_whole
from specmm.loading.hardware import Place
from specmm.loading.pictures import upright
from specmm.methods.making import parse_method
from specmm.programs.batch_invariant import batch_invariant
from specmm.runs.run import open_model
from specmm.zoo.model_files import digest_of_models

if TYPE_CHECKING:
    from specmm.runs.run import Images

KINDS: dict[str, type] = {  # the types of fields that a record must have
    **dict.fromkeys(("method", "model", "files", "dtype", "device", "processor"), str),
    **dict.fromkeys(("options", "versions"), dict),
    **dict.fromkeys(("compiled", "batch_invariant"), bool),
    **dict.fromkeys(("seed", "threads"), int),
}
MOST = 1024  # threads, and rows of a program: a record is a stranger's, and more would end Python


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
    """Draw the picture in ``file`` again, into the folder ``out``, by its ``model``, whose location
    may have changed. ``tell`` is called with each difference from the recorded machine and
    software.

    Raises ``ValueError`` for a file without a record or with an edited one, another model, and a
    missing device. Nothing is overwritten.
    """
    record = checked_record(file)
    with Image.open(file) as opened:
        kind = {name: kind for kind, name in FORMATS.items()}.get(str(opened.format))
        if kind is None:
            raise ValueError(f"{file} must be PNG, WebP or JPEG, got {opened.format}")
        try:
            pixels = np.asarray(upright(opened))
        except ValueError as error:
            raise ValueError(f"{file} {error}") from None
    drawn = writable(out) / file.name
    if drawn.exists():
        raise ValueError(f"{drawn} is there already; choose another --out")
    names = {name: record.get(name) for name in MODELS}
    if model is not None:
        names["model"] = model
        if not Path(model).exists():
            zoo.fetched(model)
        if digest_of_models(filter(None, names.values())) != record["files"]:
            raise ValueError(
                f"{file} was drawn by {record['model']}, whose files are others than those of "
                f"{model}; leave the model out, or give that one"
            )
    place = Place.named(record["device"], record["dtype"])
    pipe = open_model("images", str(names.pop("model")), place, **names)
    differing = differences(record, pipe)
    for line in differing:
        tell(f"note: {line}, so bits may differ")
    data = picture_file(draw_again(record, pipe), kind, record)
    write_whole(drawn, data)
    with Image.open(drawn) as opened:
        equal = np.array_equal(np.asarray(opened.convert("RGB")), pixels)
    return Again(file, drawn, equal, differing)


def checked_record(file: Path) -> Record:
    """The record of a picture, for drawing it again.

    Raises ``ValueError`` for a file without a record, with an edited one, and for a file that is no
    picture.
    """
    try:
        record = read_record(file)
    except Exception as error:  # a damaged file makes a decoder fail in any way
        got = sentence_of(error)
        raise ValueError(f"{file} must be a picture that specmm saved, got: {got}") from None
    if SUM not in record:
        raise ValueError(f"{file} must be a picture that specmm saved, got one without a record")
    if not record.keys() & {"class", "prompt"}:
        raise ValueError(
            f"{file} must be a picture of a class or prompt, got an answer's: ask again"
        )
    if record.get("interrupted"):
        raise ValueError(f"{file} was interrupted: it shows what was drawn until then")
    if record[SUM] != sum_of(record):
        raise ValueError(
            f"the record in {file} was edited since: it does not say what the picture was drawn "
            "from; give its seed, class and options to specmm generate yourself"
        )
    if name := odd_field(record):
        raise ValueError(
            f"the record in {file} must hold {name} as specmm writes it, got "
            f"{shown(record.get(name))}"
        )
    return record


def odd_field(record: Record) -> str:
    """The first field of a ``record``, which is a stranger's text, that is not of its kind; "" if
    all are.
    """
    what = "class" if "class" in record else "prompt"
    batch = record.get("batch") or [record]
    asked = batch if isinstance(batch, list) else []
    fine = {name: type(record.get(name)) is kind for name, kind in {**KINDS, what: str}.items()}
    fine |= {name: isinstance(record.get(name, ""), str) for name in MODELS}
    fine["autocast"] = str(record.get("autocast", "bfloat16")) in MIXED
    fine["float32_matmul"] = record.get("float32_matmul", "high") in ("high", "medium")
    fine["device"] &= not str(record.get("device")).startswith("meta")  # without numbers
    fine["batch"] = bool(asked) and all(
        isinstance(one, dict) and type(one.get(what)) is str and type(one.get("seed")) is int
        for one in asked
    )
    bounds = {"threads": (1, MOST), "rows": (1, MOST), "place": (0, len(asked) - 1)}
    for name, (least, most) in bounds.items():
        value = record.get(name, least)
        fine[name] = fine.get(name, True) and type(value) is int and least <= value <= most
    return next((name for name, is_fine in fine.items() if not is_fine), "")


def differences(record: Record, pipe: Images) -> list[str]:
    """Sentences on how machine and software differ from ``record``; the bits may, too."""
    then = {**record["versions"], "the processor": record["processor"]}
    here = {**versions(), "the processor": processor(pipe.device)}
    sentences = [
        f"{name} was {then.get(name)} and is {now}"
        for name, now in here.items()
        if then.get(name) != now
    ]
    if record["files"] != pipe.files:
        sentences.append(f"the files of {record['model']} are others than they were")
    return sentences


def draw_again(record: Record, pipe: Images) -> Image.Image:
    """The picture of ``record`` by ``pipe``, opened in its dtype on its device.

    Raises ``ValueError`` for options that ``pipe`` does not record.
    """
    known = (*pipe.sampling_options, *pipe.call_options)
    for name in record["options"].keys() - set(known):
        raise unknown("option", name, known)
    one = {name: record[name] for name in OWN if name in record}
    asked = record.get("batch") or [one] * (record.get("rows", 1) if record["compiled"] else 1)
    kind = "class" if "class" in record else "prompt"
    arguments: dict[str, Any] = {pipe.takes: [one[kind] for one in asked]}
    if any("negative_prompt" in one for one in asked):
        arguments["negative_prompt"] = [one.get("negative_prompt", "") for one in asked]
    method = parse_method(pipe.registry, record["method"])
    seeds = [one["seed"] for one in asked]
    invariant = batch_invariant() if record["batch_invariant"] else nullcontext()
    settings = set_as_recorded(record, pipe.device.type)
    with settled(pipe.transformer, record["threads"]), invariant, settings:
        out = pipe(
            **arguments,
            **record["options"],
            seed=seeds[0] if method.one_generator else seeds,
            method=method,
            batch_size=record.get("rows", 1),
            compiled=record["compiled"],
        )
    image: Image.Image = out.images[record.get("place", 0)]
    return image
