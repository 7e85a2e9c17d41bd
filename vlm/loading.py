"""Models, processors and drafters from folders: a VLM's folder is transformers' own, its drafters lie in ``drafters/``.

``drafters/text`` holds a language model, ``drafters/vlm`` a small vision-language model (without one the first expert
drafts), ``drafters/msd`` an MSD head, ``drafters/experts`` a folder for each of the models that Speculative Verdict
hears, and ``prompts.json`` where they are asked in other words than the usual.

Shape letters: none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from specmm import methods, pretrained, zoo
from specmm.checkpoints import read_json
from specmm.layout import lay_weights
from specmm.vlm.assemble import SmallModel
from specmm.vlm.composed import build_processor, compose, is_composed

PLACES = {"text-draft": "text", "vlm-draft": "vlm", "msd": "msd", "verdict": "experts"}  # folder of each's drafter
INSTEAD = {"vlm-draft": "experts/1"}  # a small model that may be heard may draft


def find(name: str | Path) -> Path:
    """The folder of a transformers model: a local one, a pocket name or a hub id; ``ValueError`` when there is none."""
    return zoo.find(name, zoo.TRANSFORMERS)


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
        raise ValueError(f"{folder} must hold a processor of pictures and text, got a {type(found).__name__}")
    return found


def load_drafter(kind: str, folder: Path, target: Any) -> Any:
    """What method ``kind`` drafts with for the ``target`` model, from its ``folder``."""
    dtype, device = target.dtype, target.device
    if kind == methods.MSD.name:
        from specmm.vlm.drafters.msd_files import load_msd

        return lay_weights(load_msd(folder, target.get_input_embeddings().weight))
    if kind == methods.Verdict.name:
        from specmm.vlm.verdict import Experts

        return Experts.load(folder, dtype, device)
    if kind == methods.TextDraft.name:
        model = pretrained.load_model(AutoModelForCausalLM, folder, dtype=dtype).to(device)
        return SmallModel(lay_weights(model.eval()), own_tokenizer(folder))
    processor = load_processor(folder) if (folder / "processor_config.json").is_file() else None
    return SmallModel(lay_weights(load_model(folder, dtype).to(device)), processor)


def own_tokenizer(folder: Path) -> Any:
    """The drafter's own tokenizer, or None: it reads the target's tokens."""
    own = (folder / "tokenizer_config.json").is_file()
    return pretrained.load_tokenizer(folder) if own else None


def _check_kind(folder: Path) -> None:
    try:
        config = pretrained.load_config(folder)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} must hold a transformers model ({error})") from error
    if not hasattr(config, "vision_config"):
        raise ValueError(f"{folder} must hold a vision-language model, got model type {config.model_type!r}")
