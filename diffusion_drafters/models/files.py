"""Diffusion language models from folders, told apart by their ``config.json``: Dream, LLaDA, MDLM,
BD3LM.

Files of tensors only; weights are checked by name, shape and value before the first is copied.
Nothing runs that a folder brings.

Shape letters: none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specmm.checkpoints import State, load_strict, read_checkpoint, read_json
from specmm.diffusion_drafters.models.bidirectional import (
    FullAttention,
    dream_config,
    empty,
    llada_config,
    llada_state,
)
from specmm.diffusion_drafters.models.ddit import DDiT, DDiTConfig, MaskedDDiT
from specmm.diffusion_drafters.models.masked import DiffusionLM
from specmm.registry import unknown

INDEX = "model.safetensors.index.json"
EMBEDDING = "vocab_embed.embedding"
LEFTOVERS = ("inv_freq", "sampling_eps_min", "sampling_eps_max")
DREAM_MASK, LLADA_MASK = 151666, 126336  # of the released models, where a config does not say
MASKS = ("mask_token_id", "mask_index")  # what the configs of MDLM and BD3LM may call theirs
HEAD, TOKENS = "lm_head.weight", "model.embed_tokens.weight"


def load_diffusion_lm(folder: str | Path, dtype: torch.dtype | None = None) -> DiffusionLM:
    """The model in ``folder``, in evaluation mode, in ``dtype`` or the file's.

    Raises ``ValueError`` naming an unknown kind of model, sizes that are missing, layers that are
    not as published, a mask token that the model lacks, and missing, extra, misshapen or non-finite
    weights.
    """
    facts, state = read_json(Path(folder) / "config.json"), read_state(folder)
    kind = _kind(facts)
    if kind not in READERS:
        raise unknown("kind of diffusion language model", kind, READERS)
    wanted = dtype or next(t.dtype for t in state.values() if t.is_floating_point())
    return READERS[kind](facts, state, folder, wanted)


def read_state(folder: str | Path) -> State:
    """The tensors in ``folder``, in one file or in the several that an index names."""
    index = Path(folder) / INDEX
    if not index.is_file():
        return read_checkpoint(folder)
    files = sorted(set(read_json(index).get("weight_map", {}).values()))
    return {
        name: t
        for file in files
        for name, t in read_checkpoint(index.parent / Path(file).name).items()
    }


def cast(module: Any, dtype: torch.dtype) -> Any:
    """``module`` with its weights in ``dtype``; its buffers, the rotary frequencies, would not
    survive rounding.
    """
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    return module


def write_model(
    state: State, facts: dict[str, Any], folder: str | Path, dtype: torch.dtype
) -> None:
    """Write tensors, numbers in ``dtype`` and ids as they are, and the config of a drafter."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtypes = {
        name: dtype if tensor.is_floating_point() else tensor.dtype
        for name, tensor in state.items()
    }
    kept = {
        name: tensor.detach().to("cpu", dtypes[name]).contiguous() for name, tensor in state.items()
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


def _kind(facts: Mapping[str, Any]) -> str:
    """The model type; MDLM's training configs say it by their parameterization."""
    return str(
        facts.get("model_type") or ("mdlm" if facts.get("parameterization") == "subs" else None)
    ).lower()


def _dream(
    facts: Mapping[str, Any], state: State, source: str | Path, dtype: torch.dtype
) -> DiffusionLM:
    return _full(dream_config(facts), facts, state, source, dtype, DREAM_MASK, shift=1)


def _llada(
    facts: Mapping[str, Any], state: State, source: str | Path, dtype: torch.dtype
) -> DiffusionLM:
    return _full(llada_config(facts), facts, llada_state(state), source, dtype, LLADA_MASK, shift=0)


def _full(
    config: Any,
    facts: Mapping[str, Any],
    state: State,
    source: str | Path,
    dtype: torch.dtype,
    mask: int,
    shift: int,
) -> FullAttention:
    model = empty(config)
    if config.tie_word_embeddings and TOKENS in state:
        state = {HEAD: state[TOKENS], **state}
    load_strict(model, state, LEFTOVERS, source)
    said = facts.get("mask_token_id")
    return FullAttention(
        cast(model, dtype), mask if said is None else said, facts.get("eos_token_id"), shift
    )


def _ddit(
    facts: Mapping[str, Any], state: State, source: str | Path, dtype: torch.dtype
) -> DiffusionLM:
    if facts.get("time_conditioning"):
        raise ValueError(f"{source} must be a model without time conditioning, got one with it")
    state = {name.removeprefix("backbone."): tensor for name, tensor in state.items()}
    network = DDiT(_ddit_config(facts, state, source))
    load_strict(network, state, LEFTOVERS, source)
    said = next((facts[name] for name in MASKS if facts.get(name) is not None), None)
    return MaskedDDiT(cast(network, dtype), said, facts.get("eos_token_id"))


def _ddit_config(facts: Mapping[str, Any], state: State, source: str | Path) -> DDiTConfig:
    """Sizes by their names on the hub or in a training config (nested under ``model``)."""
    given = {**facts, **facts.get("model", {})}

    def size(*names: str) -> int:
        found = next((given[n] for n in names if isinstance(given.get(n), int)), None)
        if found is None:
            raise ValueError(
                f"{source} must give {' or '.join(names)} as a whole number in config.json, got none"
            )
        return int(found)

    if EMBEDDING not in state:
        raise ValueError(f"{source} must hold {EMBEDDING}, got {len(state)} other tensors")
    return DDiTConfig(
        vocabulary=len(state[EMBEDDING]),
        width=size("hidden_dim", "hidden_size"),
        condition=size("cond_dim"),
        layers=size("n_blocks"),
        heads=size("n_heads"),
        length=size("model_length", "length"),
        block=size("block_size") if _kind(facts) == "bd3lm" else 0,
    )


Reader = Callable[[Mapping[str, Any], State, "str | Path", torch.dtype], DiffusionLM]
READERS: dict[str, Reader] = {"dream": _dream, "llada": _llada, "mdlm": _ddit, "bd3lm": _ddit}
