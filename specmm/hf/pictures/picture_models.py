"""Recognises transformers models that draw pictures by their folders; each is described in its own
module (:class:`specmm.hf.pictures.picture_tokens.PictureModel`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmm import zoo
from specmm.extending.registry import named
from specmm.loading.checkpoints import read_json

if TYPE_CHECKING:
    from specmm.hf.pictures.picture_tokens import PictureModel

PICTURE_MODELS: dict[str, str] = {  # descriptions by the "model_type" in config.json
    "chameleon": "specmm.hf.pictures.chameleon:CHAMELEON",
    "emu3": "specmm.hf.pictures.emu3:EMU3",
    "glm_image": "specmm.hf.pictures.glm_image:GLM_IMAGE",
    "janus": "specmm.hf.pictures.janus:JANUS",
}
PICTURE_PIPELINES = {"GlmImagePipeline": "glm_image"}  # diffusers pipelines around such a model
PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # beside models that see


def draws_pictures(folder: Path) -> bool:
    """Whether :func:`picture_type` finds a description, without importing it."""
    return _type(folder) in PICTURE_MODELS


def picture_type(folder: Path) -> PictureModel | None:
    """The description of the drawing transformers model in ``folder``, or in a diffusers pipeline
    there; None for other folders.
    """
    kind = _type(folder)
    if kind not in PICTURE_MODELS:
        return None
    facts: PictureModel = named(PICTURE_MODELS[kind])
    return facts


def processes(folder: Path) -> bool:
    """Whether the folder also has a processor that reads pictures."""
    return any((folder / name).is_file() for name in PROCESSORS)


def _type(folder: Path) -> Any:
    kind = _value(folder / zoo.TRANSFORMERS, "model_type")
    if kind is not None:
        return kind
    return PICTURE_PIPELINES.get(str(_value(folder / zoo.PIPELINE, "_class_name")))


def _value(file: Path, key: str) -> Any:
    return read_json(file).get(key) if file.is_file() else None
