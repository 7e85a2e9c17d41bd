"""Drafters of text models from the folders in their target's ``drafters/``.

``drafters/diffusion`` holds a diffusion language model (with ``ngram.safetensors``, DiffuSpec's
proxy, and a tokenizer where it has its own), ``drafters/deer`` a DEER drafter, ``drafters/block`` a
DFlash one, ``drafters/text`` a small autoregressive model.

Shape letters: none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specmm.checkpoints import read_json
from specmm.diffusion_drafters.assemble import Diffusion
from specmm.diffusion_drafters.diffuspec.ngram import NGram
from specmm.diffusion_drafters.models.causal import CausalPrefix, check_target, is_deer, load_deer
from specmm.diffusion_drafters.models.dflash import DFlash, load_dflash
from specmm.diffusion_drafters.models.files import load_diffusion_lm
from specmm.hf.pretrained import own_tokenizer
from specmm.prepacked import lay_weights

PROXY = "ngram.safetensors"


def load_block(folder: Path, target: Any, method: str) -> DFlash:
    """The DFlash drafter in ``folder`` for the ``target`` model."""
    check_target(read_json(folder / "config.json"), target, folder)
    return lay_weights(load_dflash(folder, target.dtype).to(target.device))


def load_deer_or_diffusion(folder: Path, target: Any, method: str) -> CausalPrefix | Diffusion:
    """The DEER drafter in ``folder``, or the diffusion model there, which can be one."""
    return load_deer(folder, target) if is_deer(folder) else load_diffusion(folder, target, method)


def load_diffusion(folder: Path, target: Any, method: str) -> Diffusion:
    """The diffusion language model in ``folder``, its tokenizer and its n-gram proxy, if any."""
    proxy = NGram.load(folder / PROXY) if (folder / PROXY).is_file() else None
    return Diffusion(load_diffusion_lm(folder, target.dtype), own_tokenizer(folder), proxy)
