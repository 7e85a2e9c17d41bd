"""How an image model is meant to be sampled, beside its weights, and what the user may say instead.

Every family has a frozen dataclass of its own for it, with class names by id among its fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from specmm import __version__
from specmm.checkpoints import read_json
from specmm.registry import unknown

FILE = "settings.json"
T = TypeVar("T")


def read_settings(kind: type[T], folder: Path) -> T:
    """The ``kind`` of settings beside a model, or the defaults; raises ``ValueError`` for a setting
    it has not.
    """
    file = folder / FILE
    if not file.exists():
        return kind()
    found, known = read_json(file), [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in found.keys() - set(known):
        raise unknown(f"setting in {file}", key, known)
    return kind(**{key: _frozen(value) for key, value in found.items()})


def write_settings(settings: Any, folder: Path) -> None:
    """Write settings beside a model."""
    (folder / FILE).write_text(json.dumps(dataclasses.asdict(settings), indent=1) + "\n")


def write_index(pipeline: str, family: str, folder: Path) -> None:
    """Write down beside a model which ``pipeline`` it was saved by, and its ``family``, by which it
    is opened.
    """
    index = {"_class_name": pipeline, "_specmm_version": __version__, "family": family}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")


def with_options(settings: T, **options: Any) -> T:
    """``settings`` with every option that is not None in place of its own."""
    given = {k: v for k, v in options.items() if v is not None}
    return dataclasses.replace(settings, **given)  # type: ignore[type-var]


def _frozen(value: Any) -> Any:
    """Lists of JSON as the tuples they were."""
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def class_ids(wanted: Sequence[str | int], names: Sequence[str], count: int) -> list[int]:
    """Ids of class names or ids (also as text, "3"); raises ``ValueError`` with a suggestion for an
    unknown one.
    """
    ids = []
    for item in wanted:
        if str(item).isdecimal():
            if int(item) >= count:
                raise ValueError(f"class id must be below {count}, got {item}")
            ids.append(int(item))
        elif item in names:
            ids.append(list(names).index(str(item)))
        else:
            raise unknown("class", item, names)
    return ids


def class_labels(pipe: Any, wanted: str | int | Sequence[str | int], repeats: int = 1) -> Tensor:
    """Labels of what ``pipe`` is to draw, ``repeats`` of each of ``wanted``; ``ValueError`` as of
    ``class_ids``.
    """
    wanted = [wanted] if isinstance(wanted, str | int) else wanted
    if not wanted:
        raise ValueError("classes must name at least one class, got none")
    ids = class_ids(wanted, pipe.settings.classes, pipe.transformer.config.num_classes)
    return torch.tensor(ids, device=pipe.device).repeat_interleave(repeats)
