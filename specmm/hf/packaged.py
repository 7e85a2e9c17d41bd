"""Target models whose weights come in a Python package: installed, never shipped, unpacked once.

A folder with ``package.json`` names the package and the GGUF file in it; drafters lie beside it as
beside any model.

Shape letters: none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specmm.checkpoints import read_json
from specmm.hf import pretrained
from specmm.zoo import PACKAGE

HELPERS = ("gguf", "accelerate")  # that transformers unpacks with
CACHE = Path("~/.cache/specmm/unpacked")


def is_packaged(folder: Path) -> bool:
    """Whether ``folder`` names a package in place of weights."""
    return (folder / PACKAGE).is_file()


def unpacked(folder: Path, cache: Path | None = None) -> Path:
    """A transformers folder of the model that ``folder`` names, float32, made at first use.

    Raises ``ValueError`` saying what to install where the package is missing.
    """
    facts = read_json(folder / PACKAGE)
    found = (cache or CACHE.expanduser()) / str(facts["file"])
    if not (found / "config.json").is_file():
        _unpack(_package_folder(facts), facts, found)
    return found


def missing_packages(folder: Path) -> list[str]:
    """What must be installed before the model of ``folder`` can be unpacked."""
    return _missing(read_json(folder / PACKAGE))


def _missing(facts: dict[str, Any]) -> list[str]:
    return [n for n in (facts["package"], *HELPERS) if importlib.util.find_spec(n) is None]


def _package_folder(facts: dict[str, Any]) -> Path:
    missing = _missing(facts)
    spec = None if missing else importlib.util.find_spec(facts["package"])
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"this model needs {', '.join(missing)}, run: {facts['install']}")
    return Path(spec.submodule_search_locations[0])


def _unpack(source: Path, facts: dict[str, Any], into: Path) -> None:
    """Write the model whole or not at all: another process may be at it, too."""
    part = into.with_name(f"{into.name}.{os.getpid()}.part")
    kind: Any = AutoModelForCausalLM
    read = pretrained.load_model(kind, source, gguf_file=facts["file"], dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = kind.from_config(
        read.config
    )  # one that does not think itself quantised, and can be written
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer = pretrained.load_tokenizer(source, gguf_file=facts["file"])
    tokenizer.mask_token = facts["mask_token"]
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(into, ignore_errors=True)
    part.rename(into)
