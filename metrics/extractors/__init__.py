"""Feature networks by name, loaded when asked for; each says in its protocol what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specmm.metrics.extractors.base import Extractor
from specmm.registry import Registry

EXTRACTORS = Registry(
    "extractor",
    {
        "inception": "specmm.metrics.inception:Inception",
        "inception-fidelity": "specmm.metrics.extractors.fidelity:FidelityInception",
        "efficientnet-lite0": "specmm.metrics.extractors.efficientnet:EfficientNetLite0",
        "dinov2": "specmm.metrics.extractors.dinov2:DINOv2",
        "clip": "specmm.metrics.extractors.clip:CLIP",
    },
)


def extractor(name: str = "inception", *, weights: Path | None = None, **options: Any) -> Extractor:
    """The extractor called ``name``; ``weights`` is its file, or a folder that holds it.

    ``options``: ``device`` and ``dtype``. Raises ``ValueError`` for an unknown name (with a
    suggestion), and where the weights are not to be found (saying where to put them).
    """
    return EXTRACTORS.get(name)(weights=weights, **options)
