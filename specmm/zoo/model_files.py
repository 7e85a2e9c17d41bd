"""Digests of models' files, so that resumed jobs and repeated pictures use the same models.

A model's name is not enough: its folder may have been trained further or converted again. A digest
covers a file's size and ``PARTS`` pieces spread over it, since reading 100 GB would take minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from specmm import zoo
from specmm.loading.checkpoints import FOLDER_NAMES, PICKLED

PARTS = 256
PIECE = 4096  # bytes
KINDS = (*PICKLED, *{Path(name).suffix for name in FOLDER_NAMES}, ".json")
CARD = "card.json"  # about a model, not of it


def files_of_models(names: Iterable[str]) -> dict[str, str]:
    """Digests of the files of the models called ``names``, by name and path.

    Nothing is fetched: models that this process has not found yet are left out.
    """
    return {
        f"{name}: {file.relative_to(folder)}": digest(file)
        for name in names
        for folder in _folders(name)
        for file in sorted(folder.rglob("*"))
        if file.suffix in KINDS and file.name != CARD and file.is_file()
    }


def digest_of_models(names: Iterable[str]) -> str:
    """One digest of the result of :func:`files_of_models`; "" if that is empty."""
    digests = sorted(digest for _, digest in files_of_models(names).items())
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else ""


def _folders(name: str) -> Iterator[Path]:
    """The folder of the model called ``name``, if it is known."""
    folder = zoo.pocket_models().get(name, Path(name))
    located = folder if folder.is_dir() else zoo.LOCATED.get((name, zoo.USUAL))
    if located is not None:
        yield located


def digest(file: Path) -> str:
    """Hexadecimal digits of a file's size and pieces."""
    size = file.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for offset in range(0, size, max(size // PARTS, PIECE)):
            opened.seek(offset)
            sha.update(opened.read(PIECE))
    return sha.hexdigest()[:16]


def check_files(folder: Path, began: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if the job in ``folder`` began with files of other ``digests``.

    New files, such as a new drafter's, do not matter.
    """
    for name in began.keys() & digests.keys():
        if began[name] != digests[name]:
            model, _, file = name.rpartition(": ")
            raise ValueError(
                f"{folder} was begun with another {file} of {model}: results of both would mix; "
                "put that file back, or choose another --out"
            )
