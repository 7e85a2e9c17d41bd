"""Targets of transformers from folders: a model, its tokenizer, where a name leads.

Shape letters: none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specmm import zoo
from specmm.hf import pretrained
from specmm.hf.packaged import is_packaged, unpacked


def find(name: str | Path) -> Path:
    """The folder of a transformers model: a local one, a pocket name or a hub id.

    ``ValueError`` when there is none.
    """
    return zoo.find(name, zoo.TRANSFORMERS)


def find_target(name: str | Path) -> Path:
    """The folder of a text model, which may name a package in place of weights."""
    folder = zoo.pocket_models().get(str(name), Path(name))
    return folder if is_packaged(folder) else find(name)


def weights_folder(folder: Path) -> Path:
    """Where transformers finds the target of ``folder``: there, or where its package is unpacked."""
    return unpacked(folder) if is_packaged(folder) else folder


def load_target(folder: Path, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The causal language model in ``folder`` and its tokenizer.

    ``ValueError`` when it holds something else.
    """
    folder = weights_folder(folder)
    try:
        model = pretrained.load_model(AutoModelForCausalLM, folder, dtype=dtype or "auto")
        tokenizer = pretrained.load_tokenizer(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder} must hold a causal language model and its tokenizer ({error})"
        ) from error
    return model.eval(), tokenizer


def own_tokenizer(folder: Path) -> Any:
    """The drafter's own tokenizer, or None: it reads the target's tokens."""
    own = (folder / "tokenizer_config.json").is_file()
    return pretrained.load_tokenizer(folder) if own else None
