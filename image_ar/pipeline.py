"""``ImagePipeline``: opens an image model of any family as the pipeline of its family."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from specmm import zoo
from specmm.checkpoints import read_json
from specmm.registry import unknown

FAMILIES = {  # by the "family" in model_index.json
    "llamagen": ("specmm.image_ar.tokens.pipeline", "LlamaGenPipeline"),
}


class ImagePipeline:
    """Pictures from an autoregressive image model, by any of its methods, with a certificate.

    >>> pipe = ImagePipeline.from_pretrained("pocket/llamagen", method="lantern++")
    >>> out = pipe(classes=["heart"], generator=torch.Generator().manual_seed(0))
    """

    @staticmethod
    def from_pretrained(name: str | Path, **options: Any) -> Any:
        """The family's pipeline of a folder, a pocket name or a hub id, with its ``options`` (``method``, …).

        Raises ``ValueError`` for a model that cannot be found or read.
        """
        folder = zoo.find(name)
        family = read_json(folder / "model_index.json").get("family", "llamagen")
        if family not in FAMILIES:
            raise unknown(f"family in {folder / 'model_index.json'}", family, FAMILIES)
        module, kind = FAMILIES[family]
        return getattr(import_module(module), kind).from_pretrained(name, **options)
