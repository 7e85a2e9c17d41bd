"""What the families' model files share: weights under official names beside a ``config.json`` of
sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specmm.checkpoints import read_json, weights_file

T = TypeVar("T")


def save_module(
    model: nn.Module, config: Any, folder: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write ``model.safetensors`` (in bf16, say, with ``dtype``) and ``config`` as ``config.json``
    into ``folder``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    state = {k: v.to(dtype or v.dtype) if v.is_floating_point() else v for k, v in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({"model": type(config).__name__, **asdict(config)}, indent=2) + "\n"
    )


def read_config(path: str | Path, kind: type[T]) -> T | None:
    """The ``kind`` of configuration in the ``config.json`` beside ``path``'s weights; None when
    there is none.

    A file of another program (LANTERN's, a hub's) has no ``model`` of ours in it and counts as
    none. Raises ``ValueError`` when it is ours and is not JSON, describes another kind of model or
    holds unknown names.
    """
    file = weights_file(path).with_name("config.json")
    sizes = read_json(file) if file.is_file() else {}
    if not str(sizes.get("model", "")).endswith("Config"):
        return None
    if (found := sizes.pop("model")) != kind.__name__:
        raise ValueError(
            f"{file} must describe a {kind.__name__}, got a {found}, point to the right folder"
        )
    unknown = set(sizes) - {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(
            f"{file} must hold sizes of {kind.__name__}, got {', '.join(sorted(unknown))}"
        )
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()})


def shape_of(state: Mapping[str, Tensor], key: str, source: str | Path) -> torch.Size:
    """The shape of a weight; raises ``ValueError`` naming the one that is missing."""
    if key not in state:
        raise ValueError(f"{source} must hold {key}, got a file without it: is it another model's?")
    return state[key].shape


def count(state: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number that ``pattern`` finds at the start of a name."""
    found = (re.match(pattern, key) for key in state)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
