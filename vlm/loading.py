"""Models, processors and drafters from folders: a VLM's folder is transformers' own, its drafters
lie in ``drafters/``.

``drafters/text`` holds a language model, ``drafters/vlm`` a small vision-language model (without
one the first expert drafts), ``drafters/msd`` an MSD head, ``drafters/experts`` a folder for each
of the models that Speculative Verdict hears, and ``prompts.json`` where they are asked in other
words than the usual.

Shape letters: none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from specmm.checkpoints import read_json
from specmm.hardware import prepack
from specmm.hf import pretrained
from specmm.hf.drafters.small_model import SmallModel
from specmm.vlm.composed import build_processor, compose, is_composed


def load_model(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The vision-language model in ``folder``; ``ValueError`` when it holds something else."""
    if is_composed(folder):
        return compose(folder, dtype)
    _check_kind(folder)
    return pretrained.load_model(AutoModelForImageTextToText, folder, dtype=dtype or "auto").eval()


def load_processor(folder: Path) -> Any:
    """The processor beside the model; ``ValueError`` when there is none."""
    if is_composed(folder):
        return build_processor(read_json(folder / "config.json")["language_model"])
    try:
        found = pretrained.load_processor(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} must hold a processor beside the model ({error})") from error
    if not hasattr(found, "tokenizer"):
        raise ValueError(
            f"{folder} must hold a processor of pictures and text, got a {type(found).__name__}"
        )
    return found


def load_small(folder: Path, target: Any, method: str) -> SmallModel:
    """The small vision-language model in ``folder``, as the ``target`` model is, with its
    processor.
    """
    processor = load_processor(folder) if (folder / "processor_config.json").is_file() else None
    return SmallModel(prepack(load_model(folder, target.dtype).to(target.device)), processor)


def _check_kind(folder: Path) -> None:
    try:
        config = pretrained.load_config(folder)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} must hold a transformers model ({error})") from error
    if not hasattr(config, "vision_config"):
        raise ValueError(
            f"{folder} must hold a vision-language model, got model type {config.model_type!r}"
        )
