"""Text models and their drafters from folders: a target's folder is transformers' own, drafters lie in ``drafters/``.

``drafters/diffusion`` holds a diffusion language model (with ``ngram.safetensors``, DiffuSpec's proxy, and a tokenizer
where it has its own), ``drafters/deer`` a DEER drafter, ``drafters/block`` a DFlash one, ``drafters/text`` a small
autoregressive model.

Shape letters: none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specmm import methods, pretrained, zoo
from specmm.checkpoints import read_json
from specmm.diffusion_drafters.assemble import Diffusion
from specmm.diffusion_drafters.diffuspec.ngram import NGram
from specmm.diffusion_drafters.models.causal import check_target, is_deer, load_deer
from specmm.diffusion_drafters.models.dflash import load_dflash
from specmm.diffusion_drafters.models.files import load_diffusion_lm
from specmm.diffusion_drafters.packaged import is_packaged, unpacked
from specmm.layout import lay_weights
from specmm.vlm.loading import find, own_tokenizer
from specmm.vlm.loading import load_drafter as load_vlm_drafter

PLACES = {"diffuspec": "diffusion", "specdiff": "diffusion", "deer": "deer", "block": "block", "text-draft": "text"}
PROXY = "ngram.safetensors"


def find_target(name: str | Path) -> Path:
    """The folder of a text model: a local one, a pocket name or a hub id; ``ValueError`` when there is none."""
    folder = zoo.pocket_models().get(str(name), Path(name))
    return folder if is_packaged(folder) else find(name)


def weights_folder(folder: Path) -> Path:
    """Where transformers finds the target of ``folder``: there, or where its package's weights are unpacked."""
    return unpacked(folder) if is_packaged(folder) else folder


def load_target(folder: Path, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """The causal language model in ``folder`` and its tokenizer; ``ValueError`` when it holds something else."""
    folder = weights_folder(folder)
    try:
        model = pretrained.load_model(AutoModelForCausalLM, folder, dtype=dtype or "auto")
        tokenizer = pretrained.load_tokenizer(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} must hold a causal language model and its tokenizer ({error})") from error
    return model.eval(), tokenizer


def load_drafter(kind: str, folder: Path, target: Any) -> Any:
    """What method ``kind`` drafts with for the ``target`` model, from its ``folder``."""
    if kind == methods.Block.name:
        check_target(read_json(folder / "config.json"), target, folder)
        return lay_weights(load_dflash(folder, target.dtype).to(target.device))
    if kind == methods.TextDraft.name:
        return load_vlm_drafter(kind, folder, target)
    if kind == methods.DEER.name and is_deer(folder):
        return load_deer(folder, target)
    proxy = NGram.load(folder / PROXY) if (folder / PROXY).is_file() else None
    return Diffusion(load_diffusion_lm(folder, target.dtype), own_tokenizer(folder), proxy)
