"""Reads drafters' folders of any layout: tensors in one or several files, and a ``config.json``.

Names, shapes and values of all weights are checked before the first is copied. No code in a folder
is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config

from specmm.loading.checkpoints import (
    State,
    check_fingerprint,
    embeddings_of,
    fingerprint,
    read_checkpoint,
    read_json,
)

INDEX = "model.safetensors.index.json"
LEFTOVERS = ("inv_freq", "sampling_eps_min", "sampling_eps_max")
HEAD = "lm_head.weight"
TOKENS = "model.embed_tokens.weight"
QWEN_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
STATES = "aux_hidden_state_layer_ids"
ACCEPTANCE = "acceptance.json"  # by temperature, level and rank; ours only
# [levels, ranks]: the chance that this child is the one kept.
Acceptance = tuple[tuple[float, ...], ...]
Facts = Mapping[str, Any]  # the content of a config.json
Network = TypeVar("Network", bound=nn.Module)


def read_state(folder: str | Path) -> State:
    """The tensors in ``folder``, from one file or from the files that an index names."""
    index = Path(folder) / INDEX
    if not index.is_file():
        return read_checkpoint(folder)
    state: State = {}
    for file in sorted(set(read_json(index).get("weight_map", {}).values())):
        state |= read_checkpoint(index.parent / Path(file).name)
    return state


def renamed(state: Mapping[str, Tensor], table: Mapping[str, str]) -> State:
    """``state`` without the prefix ``model.``, other prefixes by the ``table`` (theirs: ours)."""
    new_state: State = {}
    for name, tensor in state.items():
        name = name.removeprefix("model.")
        for theirs, ours in table.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        new_state[name] = tensor
    return new_state


def cast(module: Network, dtype: torch.dtype) -> Network:
    """``module`` with weights in ``dtype``; buffers stay, as rounding would spoil rotary ones."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    return module


def check_ids(ids: Tensor, count: int, vocabulary: int, what: str = "d2t") -> None:
    """Raise ``ValueError`` unless ``ids`` are ``count`` different ids below ``vocabulary``."""
    possible = bool(((ids >= 0) & (ids < vocabulary)).all())
    if len(ids.unique()) != count or len(ids) != count or not possible:
        raise ValueError(
            f"{what} must name {count} different tokens in [0, {vocabulary}), "
            "got others or some twice"
        )


def layers_named(facts: Facts) -> tuple[int, ...]:
    """The target's layers that a drafter of any layout reads, counted from 0; empty if ``facts`` do
    not say.

    speculators counts states, where state 0 is the embeddings. The nested fields of z-lab and
    SpecForge, transformers' assistants and our own files count layers.
    """
    values = {**facts, **(facts.get("dflash_config") or {}), **(facts.get("eagle_config") or {})}
    if states := values.get(STATES) or facts.get(f"eagle_{STATES}"):
        return tuple(int(number) - 1 for number in states)
    names = ("target_layer_ids", "aux_layers", f"eagle_{STATES}")
    return tuple(int(i) for i in next((values[name] for name in names if values.get(name)), ()))


def check_target(facts: Facts, target: PreTrainedModel, source: object) -> None:
    """Raise ``ValueError`` unless the drafter of ``facts`` was trained with this ``target``."""
    recorded = facts.get("target_fingerprint")
    if recorded is not None:
        check_fingerprint(recorded, fingerprint(embeddings_of(target)), source)


def qwen_config(facts: Facts, kind: str) -> Qwen2Config:
    """The ``config.json`` of a ``kind`` of model as Qwen2's.

    Raises ``ValueError`` for missing sizes and for layers that Qwen2 does not have.
    """
    return Qwen2Config(
        **read_sizes(facts, {name: name for name in QWEN_SIZES}, kind),
        **plain_rope(facts, 10000.0),
        tie_word_embeddings=bool(facts.get("tie_word_embeddings", False)),
    )


def read_sizes(facts: Facts, names: Mapping[str, str], kind: str) -> dict[str, Any]:
    """Sizes by the keys of ``names``, read from ``facts`` under the values of ``names``.

    Raises ``ValueError`` for missing sizes.
    """
    missing = [name for name in names.values() if not isinstance(facts.get(name), int | float)]
    if missing:
        raise ValueError(
            f"the config of a {kind} model must give numbers, got none for {', '.join(missing)}"
        )
    return {ours: facts[theirs] for ours, theirs in names.items()}


def plain_rope(facts: Facts, base: float, windows: bool = False) -> dict[str, Any]:
    """Plain rotary positions as transformers 5 expects them, whichever version wrote ``facts``.

    Raises ``ValueError`` for scaled positions and, unless ``windows`` are allowed, for sliding
    windows.
    """
    rope = facts.get("rope_parameters") or {}
    if facts.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"positions must be plain rotary ones, got {facts.get('rope_scaling') or rope}"
        )
    slides = facts.get("use_sliding_window") or "sliding_attention" in (
        facts.get("layer_types") or ()
    )
    if slides and not windows:
        raise ValueError("every layer must have full attention, got layers with a sliding window")
    theta = {"rope_theta": base, **rope, **facts}["rope_theta"]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": float(theta)}}


def read_acceptance(folder: Path) -> dict[float, Acceptance]:
    """The acceptance tables by temperature in ``folder``; {} if the drafter was never measured."""
    file = folder / ACCEPTANCE
    tables = read_json(file) if file.exists() else {}
    return {
        float(temperature): tuple(tuple(row) for row in table)
        for temperature, table in tables.items()
    }


def write_acceptance(tables: Mapping[float, Acceptance], folder: Path) -> None:
    """Write the acceptance ``tables`` by temperature to ``folder``, if any."""
    if tables:
        content = {str(temperature): table for temperature, table in tables.items()}
        (folder / ACCEPTANCE).write_text(json.dumps(content, indent=1) + "\n")
