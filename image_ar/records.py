"""Records in picture files: all inputs of a picture, enough to draw it again, bit for bit on the
same machine.

Rounding depends on the pictures of a batch, so a record names the whole batch, unless it was drawn
within ``batch_invariant()``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import nn

from specmm import __version__
from specmm.choose.threads import in_use
from specmm.extending.kinds import shown, texts_of
from specmm.extending.registry import unknown
from specmm.image_ar.calls import class_ids, listed, negatives_of
from specmm.loading.files import write_whole
from specmm.loading.hardware import dtype_name
from specmm.loading.pictures import packed
from specmm.methods import label
from specmm.programs.batch_invariant import any_invariant, serves

if TYPE_CHECKING:
    from specmm.core.stats import Certificate

Record = dict[str, Any]
KEY = "specmm"  # the key in a PNG's text
DESCRIPTION = 0x010E  # EXIF ImageDescription, of other kinds of files
SUM = "sum"  # the checksum's field
FORMATS = {"png": "PNG", "webp": "WEBP", "jpeg": "JPEG"}
MODELS = ("model", "drafter", "small", "text_encoder")  # by name
OWN = ("class", "prompt", "negative_prompt", "seed")  # differ between the pictures of a call
MIXED = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # dtypes of autocast


# ---- records of a call


class Recorder:
    """Makes the records of a call of ``pipe``, a picture pipeline, with the arguments ``args``."""

    def __init__(self, pipe: Any, args: Mapping[str, Any]) -> None:
        self.pipe = pipe
        self.wanted = _picture_fields(pipe, args)
        options = pipe.options_of({name: args[name] for name in pipe.sampling_options})
        options |= {name: args[name] for name in pipe.call_options if name not in OWN}
        options = {name: value for name, value in options.items() if value is not None}
        self.maker = made_by(pipe.source, pipe.files, options, pipe.transformer)

    def records(
        self,
        part: slice,
        generators: Sequence[torch.Generator],
        method: Any,
        rows: int,
        compiled: Sequence[bool],
        certificate: Certificate,
        padded: bool,
    ) -> list[Record]:
        """The records of a ``part`` drawn together, ``rows`` at a time, ``padded`` or not."""
        pairs = zip(self.wanted[part], generators, strict=True)
        requests = [{**record, "seed": generator.initial_seed()} for record, generator in pairs]
        pipe = self.pipe
        invariant = self.maker["batch_invariant"] and not padded
        invariant = invariant and not {"autocast", "float32_matmul"} & self.maker.keys()
        invariant = invariant and serves(pipe.dtype, pipe.device) and not method.one_generator
        # the total variation is measured on the whole batch
        claim = {k: v for k, v in certificate.as_dict().items() if k != "tv"}
        records = []
        for row, (record, quick) in enumerate(zip(requests, compiled, strict=True)):
            among = {} if len(requests) == 1 else {"rows": rows, "place": row, "batch": requests}
            if invariant:  # a program rounds by its number of rows alone
                among = {"rows": rows} if quick else {}
            facts = {"method": label(method), "compiled": quick, **self.maker}
            records.append({**record, **facts, "certificate": claim, **among})
        return records


def _picture_fields(pipe: Any, args: Mapping[str, Any]) -> list[Record]:
    """The class or prompt of each picture of a call with the arguments ``args``."""
    fields: list[Record]
    if pipe.takes == "prompt":
        texts = texts_of("prompt", args["prompt"])
        negatives = negatives_of(args.get("negative_prompt"), len(texts))
        fields = [
            {"prompt": text} | ({} if negative is None else {"negative_prompt": negative})
            for text, negative in zip(texts, negatives, strict=True)
        ]
    else:
        labels = args["class_labels"] if args["classes"] is None else args["classes"]
        names = pipe.settings.classes
        ids = class_ids(listed(labels), names, pipe.transformer.config.num_classes)
        fields = [{"class": names[i] if i < len(names) else str(i)} for i in ids]
    return [dict(record) for record in fields for _ in range(args["num_images_per_prompt"])]


def made_by(source: Record, files: str, options: Record, network: nn.Module) -> Record:
    """The facts that all results of a call share: the model's name and its files' digest, the
    ``options`` of the call, and the machine, versions and settings on which numbers of ``network``
    depend.
    """
    weight = next(network.parameters())
    return {
        **source,
        "files": files,
        "options": options,
        "dtype": dtype_name(weight.dtype),
        **_settings_of_torch(weight.device.type),
        "device": str(weight.device),
        "threads": in_use().count,
        "processor": processor(weight.device),
        "versions": versions(),
        "batch_invariant": any_invariant(),
    }


def _settings_of_torch(kind: str) -> Record:
    """The user's torch settings that change the rounding of products on a ``kind`` of device."""
    facts = {}
    if torch.is_autocast_enabled(kind):
        facts["autocast"] = dtype_name(torch.get_autocast_dtype(kind))
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        facts["float32_matmul"] = precision
    return facts


@contextmanager
def set_as_recorded(record: Record, kind: str) -> Iterator[None]:
    """Context with the settings of torch that ``record`` tells of a ``kind`` of device."""
    usual = torch.get_float32_matmul_precision()
    mixed = record.get("autocast")
    torch.set_float32_matmul_precision(record.get("float32_matmul", "highest"))
    try:
        with torch.autocast(kind, MIXED[mixed]) if mixed else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(usual)


@functools.cache  # every call records them, and reading them takes milliseconds
def versions() -> dict[str, str]:
    """The versions that a picture's numbers depend on."""
    return {"specmm": __version__} | {name: version(name) for name in ("torch", "transformers")}


def processor(device: torch.device) -> str:
    """The kind of processor, on which the rounding of matrix products depends."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def maker_in(record: Record) -> Record:
    """The part of a ``record`` that pictures of one model and machine share."""
    fields = (*OWN, "method", "compiled", "certificate", "rows", "place", "batch", "inputs")
    return {name: value for name, value in record.items() if name not in fields}


# ---- files


def sealed(record: Record) -> str:
    """``record`` as text, with a checksum that shows later edits."""
    return json.dumps({**record, SUM: sum_of(record)}, ensure_ascii=True)


def sum_of(record: Record) -> str:
    """A checksum that shows whether a record was edited."""
    content = {k: v for k, v in record.items() if k != SUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def picture_file(image: Image.Image, kind: str, record: Record) -> bytes:
    """The bytes of ``image`` in format ``kind``, with its ``record``."""
    if kind == "png":
        info = PngInfo()
        info.add_text(KEY, sealed(record))
        return packed(image, pnginfo=info)
    exif = Image.Exif()
    exif[DESCRIPTION] = sealed(record)
    quality: dict[str, Any] = {"quality": 95} if kind == "jpeg" else {"lossless": True}
    return packed(image, FORMATS[kind], exif=exif, **quality)


def write_pictures(
    pictures: Sequence[Image.Image], records: Sequence[Record], files: Sequence[str | Path]
) -> None:
    """Write each of the ``pictures`` with its record to one of ``files``.

    Raises ``ValueError`` for another number of files, an unknown file format, and for arrays
    instead of images.
    """
    if len(files) != len(records):
        raise ValueError(f"files must be one for each of {len(records)} pictures, got {len(files)}")
    for picture, record, file in zip(pictures, records, map(Path, files), strict=True):
        if not isinstance(picture, Image.Image):
            raise ValueError(f"output_type must be 'pil' to save pictures, got {shown(picture)}")
        kind = {"jpg": "jpeg"}.get(suffix := file.suffix.lower().removeprefix("."), suffix)
        if kind not in FORMATS:
            raise unknown("kind of picture", kind or file.name, FORMATS)
        write_whole(file, picture_file(picture, kind, record))


def read_record(file: Path | IO[bytes]) -> Record:
    """The record in a picture's ``file``; {} if specmm did not write one."""
    with Image.open(file) as image:
        text = image.info.get(KEY) or image.getexif().get(DESCRIPTION) or "{}"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
