"""Reads and writes the files of image models: settings, configurations and weights.

Sizes come from a ``config.json`` beside the weights, else from the weights' shapes where these
determine them. Written files have the official parameter names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from specmm import __version__
from specmm.extending.registry import unknown
from specmm.loading.checkpoints import (
    LEFTOVERS,
    FileError,
    State,
    load_strict,
    read_checkpoint,
    read_json,
    weights_file,
    write_checkpoint,
)
from specmm.loading.mapped import DtypeChoice, WithoutWeights, chosen_dtype
from specmm.zoo import SETTINGS as SETTINGS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OPENED_BY = ["pipeline", "FamilyPipeline"]  # a file and its class, as diffusers names them
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound="DataclassInstance")


def with_options(settings: T, **options: object) -> T:
    """``settings`` with each option that is not None replaced."""
    chosen = {k: v for k, v in options.items() if v is not None}
    return replace(settings, **chosen)


def read_settings(kind: type[T], folder: Path) -> T:
    """The ``kind`` of settings beside a model, or the defaults.

    Raises ``ValueError`` for an unknown setting.
    """
    file = folder / SETTINGS
    if not file.exists():
        return kind()
    settings = read_json(file)
    names = _names(kind)
    for key in settings.keys() - set(names):
        raise unknown(f"setting in {file}", key, names)
    return kind(**{key: _frozen(value) for key, value in settings.items()})


def write_settings(settings: DataclassInstance, folder: Path) -> None:
    """Write a model's settings beside it."""
    (folder / SETTINGS).write_text(json.dumps(asdict(settings), indent=1) + "\n")


def write_index(family: str, folder: Path) -> None:
    """Write the index in ``folder``: the model's ``family``, and the code for diffusers."""
    index = {"_class_name": OPENED_BY, "_specmm_version": __version__, "family": family}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    opener = Path(__file__).with_name("diffusers_pipeline.py").read_bytes()
    (folder / f"{OPENED_BY[0]}.py").write_bytes(opener)


def load_module(
    path: str | Path,
    make: Callable[[T], M],
    kind: type[T],
    infer: Callable[..., T],
    config: T | None = None,
    *,
    state: State | None = None,
    leftovers: Collection[str] = LEFTOVERS,
    dtype: DtypeChoice = torch.float32,
) -> M:
    """``make(config)`` with the weights in the file or folder ``path`` (``state``: already read),
    in evaluation mode. ``dtype`` is the weights', or a function that chooses it by the number of
    parameters.

    Without ``config`` it is read as a ``kind`` from ``config.json`` beside the weights, else
    inferred by ``infer(state, source=path)``. Raises ``ValueError`` when sizes are missing and,
    naming them, when weights are missing, extra (but for ``leftovers``) or misshapen.
    """
    state = read_checkpoint(path) if state is None else state
    config = config or read_config(path, kind) or infer(state, source=path)
    with WithoutWeights():
        model = make(config)
    weights_dtype = chosen_dtype(dtype, model)
    load_strict(model, state, leftovers, path, weights_dtype)
    return model.to(weights_dtype).eval()


def save_module(model: Any, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` (in ``dtype``, such as bf16, which halves it) and the
    model's configuration as ``folder/config.json``.
    """
    facts = {"model": type(model.config).__name__, **asdict(model.config)}
    write_checkpoint(model.state_dict(), facts, folder, dtype)


def read_config(path: str | Path, kind: type[T]) -> T | None:
    """The ``kind`` of configuration in the ``config.json`` beside ``path``'s weights; None when
    there is none.

    A file that another program wrote (LANTERN, a hub) lacks our ``model`` entry and counts as none.
    Raises ``ValueError`` for a file of ours that is not JSON, describes another kind of model or
    holds unknown names.
    """
    file = weights_file(path).with_name("config.json")
    sizes = read_json(file) if file.is_file() else {}
    if not str(sizes.get("model", "")).endswith("Config"):
        return None
    model = sizes.pop("model")
    if model != kind.__name__:
        raise ValueError(
            f"{file} must describe a {kind.__name__}, got a {model}, point to the right folder"
        )
    strange = sizes.keys() - set(_names(kind))
    if strange:
        raise ValueError(
            f"{file} must hold sizes of {kind.__name__}, got {', '.join(sorted(strange))}"
        )
    return kind(**{k: _frozen(v) for k, v in sizes.items()})


def shape_of(state: Mapping[str, Tensor], key: str, source: str | Path) -> torch.Size:
    """The shape of a weight; raises ``ValueError`` naming a missing one."""
    if key not in state:
        raise FileError(source, f"must hold {key}, got a file without it: is it another model's?")
    return state[key].shape


def count(state: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number that ``pattern`` finds at the start of a name."""
    matches = (re.match(pattern, key) for key in state)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def stack_sizes(
    state: Mapping[str, Tensor], source: str | Path, levels: str = "down", block: str = "block"
) -> dict[str, Any]:
    """``ch``, ``ch_mult`` and ``num_res_blocks`` from an autoencoder's ``state``; ``levels`` and
    ``block`` are the names of its encoder's levels and residual blocks.
    """
    ch = shape_of(state, "encoder.conv_in.weight", source)[0]
    blocks = range(count(state, rf"encoder\.{levels}\.(\d+)\."))
    names = [f"encoder.{levels}.{i}.{block}.0.conv1.weight" for i in blocks]
    return {
        "ch": ch,
        "ch_mult": tuple(shape_of(state, name, source)[0] // ch for name in names),
        "num_res_blocks": count(state, rf"encoder\.{levels}\.0\.{block}\.(\d+)\."),
    }


def check_shared(message: str, shared: Mapping[str, Sequence[str]], ours: Any, theirs: Any) -> None:
    """Raise ``ValueError`` unless the configurations ``ours`` and ``theirs`` agree on all
    ``shared`` facts: each fact's name with its attribute in both, or with the attribute in each.

    ``message`` is the error's text, with a fact's ``{name}`` and values ``{ours}``, ``{theirs}``.
    """
    for name, attributes in shared.items():
        values = getattr(ours, attributes[0]), getattr(theirs, attributes[-1])
        if values[0] != values[1]:
            raise ValueError(message.format(name=name, ours=values[0], theirs=values[1]))


def _names(kind: type[DataclassInstance]) -> list[str]:
    return [field.name for field in fields(kind)]


def _frozen(value: Any) -> Any:
    """``value`` read from JSON, with lists turned back into tuples."""
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value
