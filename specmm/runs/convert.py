"""Converts releases' files to our folders, part after part, with one copy in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specmm import zoo
from specmm.extending.registry import unknown
from specmm.image_ar.continuous import loading as mar
from specmm.image_ar.files import save_module
from specmm.image_ar.scales import loading as var
from specmm.image_ar.tokens import loading as llamagen
from specmm.image_ar.tokens.gpt import GPTConfig
from specmm.loading.checkpoints import NESTING, PICKLED, FileError, read_checkpoint
from specmm.loading.files import writable
from specmm.zoo.published import (
    TRANSFORMER,
    Published,
    entry_of_file,
    linked_folder,
    published_models,
    weights_name,
)

READERS: Mapping[tuple[str, str], Callable[..., Any]] = {  # readers by family and part
    ("llamagen", TRANSFORMER): llamagen.load_gpt,
    ("llamagen", "vq"): llamagen.load_vq,
    ("mar", TRANSFORMER): mar.load_mar,
    ("mar", "vae"): mar.load_kl,
    ("var", TRANSFORMER): var.load_var,
    ("var", "small"): var.load_var,
    ("var", "vae"): var.load_vqvae,
}
EAGLE = "drafters/eagle"


def convert(
    source: str | Path,
    out: Path,
    like: str | None = None,
    others: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Write the folder ``out`` of the release ``source``: a file of weights, a published name or a
    hub id; in ``dtype``, or the files'.

    A file is told by its name, or is a model ``like`` a published one; its further parts are
    ``others``, each ``PART=FILE``, or fetched. Raises ``ValueError`` for an ``out`` that is there,
    a source that is not known and files that do not fit.
    """
    if out.exists():
        raise ValueError(f"{out} must be a new folder, it is there already; choose another")
    entry, files = _files(source, like, _named(others))
    writable(out.parent, "another OUT")
    with TemporaryDirectory(prefix="specmm-", dir=out.parent) as made:
        whole = Path(made) / "whole"
        _write(entry, linked_folder(entry, files, Path(made) / "links"), whole, dtype, files)
        whole.rename(out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {"name": entry.name, "folder": str(out), "family": entry.family, "bytes": size}


def _named(others: Sequence[str]) -> dict[str, Path]:
    """The files of ``PART=FILE``."""
    found = {}
    for text in others:
        place, equals, file = text.partition("=")
        if not equals:
            raise ValueError(f"a part must read PART=FILE, such as vae=kl16.ckpt, got {text!r}")
        found[place] = Path(file)
    return found


def _files(
    source: str | Path, like: str | None, others: Mapping[str, Path]
) -> tuple[Published, dict[str, Path]]:
    """The published model that ``source`` is, and the file of each of its parts."""
    file = Path(source)
    if file.is_dir():
        raise ValueError(f"{source} must be a release's file of weights or a name, got a folder")
    if not file.is_file():
        entry = zoo.entry_of(str(source))
        if like is not None and entry is not None:
            raise ValueError(f"--like says what a file is, got {source}, a name; leave it out")
        if like is not None or (entry is None and file.suffix in (".safetensors", *PICKLED)):
            raise ValueError(f"{source} must be a file of weights, it is not there")
        _check(entry, source)
        assert entry is not None
        return entry, _with_others(entry, {}, others)
    if like is not None and like not in published_models():
        raise unknown("published model", like, published_models())
    entry = published_models()[like] if like is not None else entry_of_file(file)
    _check(entry, source)
    assert entry is not None
    return entry, _with_others(entry, {TRANSFORMER: file}, others)


def _with_others(
    entry: Published, files: Mapping[str, Path], others: Mapping[str, Path]
) -> dict[str, Path]:
    """The file of each part of ``entry``: of ``files``, of ``others``, or fetched."""
    for place, file in others.items():
        if place not in entry.parts:
            raise unknown(f"part of {entry.name}", place, entry.parts)
        if place in files:
            raise ValueError(f"{place} must be given once, got {files[place]} and {file}")
        if not file.is_file():
            raise ValueError(f"{place} must be a file of weights, got {file}, which is not there")
    given = {**files, **others}
    for file in given.values():
        if file.suffix not in (".safetensors", *PICKLED):
            known = ", ".join((".safetensors", *PICKLED))
            raise ValueError(f"{file} must be a file of weights, which end in {known}")
    rest = {place: part for place, part in entry.parts.items() if place not in given}
    return given | zoo.files_of(entry, parts=rest)


def _check(entry: Published | None, source: str | Path) -> None:
    """Raise ``ValueError`` unless ``source`` is a model of several files."""
    if entry is None:
        raise ValueError(
            f"{source} must be a published name or file (specmm zoo --published); say what it is "
            "with --like NAME"
        )
    if not entry.parts:
        raise ValueError(f"{entry.name} needs no conversion, it opens as it is published")


def _write(
    entry: Published, links: Path, out: Path, dtype: torch.dtype | None, files: Mapping[str, Path]
) -> None:
    """Write ``out`` from the folder of ``links`` to ``files``, whose names errors mention."""
    names: dict[str | Path, Path] = {links / place: file for place, file in files.items()}
    names |= {links / place / weights_name(file): file for place, file in files.items()}
    try:
        _write_parts(entry, links, out, dtype)
    except FileError as error:
        raise FileError(names.get(error.file, error.file), error.said) from error


def _write_parts(entry: Published, links: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Write ``out`` from the folder of ``links``, part after part."""
    target: tuple[GPTConfig, str] | None = None  # the EAGLE head's target
    for place in entry.parts:
        wanted = dtype or _dtype_of(links / place)
        if place == EAGLE:  # after its target
            assert target is not None
            head = llamagen.load_eagle(links / place, target[0], dtype=wanted)
            llamagen.save_drafter(head, out / place, fingerprint=target[1])
            continue
        model = READERS[entry.family, place](links / place, dtype=wanted)
        save_module(model, out / place)
        if entry.family == "llamagen" and place == TRANSFORMER:
            target = model.config, llamagen.target_fingerprint(model)
        del model
    for name in (zoo.PIPELINE, "settings.json"):
        shutil.copyfile(links / name, out / name)


def _dtype_of(path: Path) -> torch.dtype:
    """The dtype of the weights in ``path``, which are not read."""
    state = read_checkpoint(path, (mar.EMA, "trainer", *NESTING))
    for tensor in state.values():
        if tensor.is_floating_point():
            return tensor.dtype
    raise FileError(path, "must hold weights, got whole numbers alone")
