"""Matches prompts to pictures, for CLIPScore."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specmm.loading.files import JSON_LINES, json_lines, text_lines

if TYPE_CHECKING:
    from specmm.metrics.inputs import PictureFile, PictureSource


def read_prompts(file: Path, pictures: Sequence[PictureFile]) -> tuple[list[str], str]:
    """The prompts in ``file`` in the order of ``pictures``, and a note where that order surprises.

    A ``.jsonl`` assigns prompts to pictures, by ``file`` (as seen from its own folder; ``member``
    in an archive) and ``prompt``; any other file holds a prompt a line. Raises ``ValueError`` for a
    line without a prompt, and for pictures that a .jsonl does not name.
    """
    if file.suffix.lower() in JSON_LINES:
        return _by_name(file, pictures), ""
    lines = [line.rstrip("\r\n") for line in text_lines(file)]
    blank = next((i for i, text in enumerate(lines, 1) if not text.strip()), None)
    if blank is not None:
        raise ValueError(f"{file} line {blank} must hold a prompt, got an empty line")
    return lines, _surprise([str(Path(p.member or p.path).name) for p in pictures])


def of_readable(texts: Sequence[str], pictures: PictureSource) -> Iterator[str]:
    """The ``texts`` whose ``pictures`` can be read. The pictures are iterated in step with these
    texts, and note which they skip.
    """
    for number, text in enumerate(texts):
        name = str(pictures.files[number]) if number < len(pictures.files) else ""
        if all(skipped != name for skipped, _ in pictures.skipped):
            yield text


def _by_name(file: Path, pictures: Sequence[PictureFile]) -> list[str]:
    """The prompts of ``pictures`` from a .jsonl ``file`` that names each picture."""
    prompts: dict[tuple[Path, str], str] = {}
    for where, row in json_lines(file):
        row = row if isinstance(row, dict) else {type(row).__name__: None}
        names = {"file", "prompt", *({"member"} & row.keys())}
        if not all(isinstance(row.get(name), str) for name in names):
            got = ", ".join(row)[:200]
            raise ValueError(f"{where} must hold texts file and prompt, got {got}")
        key = _place(file.parent / row["file"]), row.get("member", "")
        if prompts.setdefault(key, row["prompt"]) != row["prompt"]:
            raise ValueError(f"{where}: {row['file']} has two prompts; keep one")
    keys = [(_place(picture.path), picture.member) for picture in pictures]
    lacking = [picture for picture, key in zip(pictures, keys, strict=True) if key not in prompts]
    if lacking or not pictures:
        first = f"{lacking[0]} of {len(lacking)} without" if lacking else "no files of pictures"
        raise ValueError(f"{file} must name every picture with its prompt, got {first}; add them")
    return [prompts[key] for key in keys]


def _place(path: Path) -> Path:
    """``path`` in its real folder; the name is not resolved, as two links may have two prompts."""
    return path.parent.resolve() / path.name


def _surprise(names: Sequence[str]) -> str:
    """A note if numbered pictures are not in the order of their numbers: 10 before 2."""
    parts = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name in names]
    if not all(parts) or len({(p[1], p[3]) for p in parts if p}) != 1:
        return ""
    numbers = [int(p[2]) for p in parts if p]
    for name, later, here, there in zip(names, names[1:], numbers, numbers[1:], strict=False):
        if here > there:
            return f"line by line in the order of names as text, where {name} is before {later}"
    return ""
