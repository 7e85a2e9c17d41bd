"""``ImagePipeline``: opens an image model of any family as the pipeline of its family."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from specmm import methods, zoo
from specmm.checkpoints import read_json
from specmm.registry import Registry, unknown


@dataclass(frozen=True)
class Family:
    """Where a family's pipeline is, its methods by name, and those that ``specmm bench`` compares
    unless told.
    """

    module: str
    pipeline: str
    methods: Registry
    compared: str


FAMILIES = {  # by the "family" in model_index.json
    "llamagen": Family(
        "specmm.image_ar.tokens.pipeline",
        "LlamaGenPipeline",
        methods.IMAGE_TOKENS,
        "speculative,lantern++",
    ),
    "mar": Family("specmm.image_ar.continuous.pipeline", "MARPipeline", methods.CONTINUOUS, "cspd"),
    "var": Family(
        "specmm.image_ar.scales.pipeline", "VARPipeline", methods.SCALES, "code,speculative"
    ),
}


class ImagePipeline:
    """Pictures from an autoregressive image model, by any of its methods, with a certificate.

    >>> pipe = ImagePipeline.from_pretrained("pocket/llamagen", method="lantern++")
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    @staticmethod
    def from_pretrained(name: str | Path, **options: Any) -> Any:
        """The pipeline of a folder, a pocket name or a hub id; ``options``: ``method``, ``device``,
        …

        Raises ``ValueError`` for a model that cannot be found or read.
        """
        family = family_of(name)
        return getattr(import_module(family.module), family.pipeline).from_pretrained(
            name, **options
        )


def family_of(name: str | Path) -> Family:
    """The family of a model; raises ``ValueError`` when the model is not found or of none we know."""
    file = zoo.find(name) / "model_index.json"
    family = read_json(file).get("family", "llamagen")
    if family not in FAMILIES:
        raise unknown(f"family in {file}", family, FAMILIES)
    return FAMILIES[family]
