"""Lets diffusers open a folder of ours, into which ``save_pretrained`` copies this file.

>>> pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)

Other folders, such as a pocket model's, are opened with ``custom_pipeline=specmm.custom_pipeline``.

diffusers copies this file, imports the copy and makes the only pipeline in it from the components
that :meth:`FamilyPipeline.extract_init_dict` names. It loads each component by its class, found by
name in an imported module. The one component is the family's pipeline, which the user then gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from specmm import methods
from specmm.image_ar.pipeline import ImagePipeline


class FamilyPipeline(DiffusionPipeline, nn.Module):  # type: ignore[misc]  # modules get a dtype
    """Placeholder until the folder says which family's pipeline it holds."""

    def __new__(cls, opened: Any, method: Any = None) -> Any:
        """``opened`` itself, with ``method`` as its default method."""
        if method is not None:
            opened.method = methods.make(opened.registry, method)
        return opened

    def __init__(self, opened: Any, method: Any = None) -> None:
        """Never runs: ``__new__`` returns an object of another class."""

    @classmethod
    def extract_init_dict(
        cls, config_dict: dict[str, Any], **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The one component, and the options that are left unused."""
        return {"opened": (cls.__module__, cls.__name__)}, options, {}

    @classmethod
    def from_pretrained(cls, folder: str | Path, torch_dtype: torch.dtype | None = None) -> Any:
        """The pipeline of a folder, as diffusers loads a component."""
        return ImagePipeline.from_pretrained(folder, torch_dtype=torch_dtype)
