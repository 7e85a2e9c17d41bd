"""CLIPScore: how well a picture fits its text (Hessel et al. 2021, eq. 1).

w max(cos(picture, text), 0) with w = 100, as torchmetrics and most tables print it; the paper's w =
2.5 is in ``parts``. Averaged over pairs, streamed: memory does not depend on how many there are.
Texts are given as they are; the paper's prefix "A photo depicts" is left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from specmm.metrics.averages import Mean, pairs
from specmm.metrics.extractors.base import batches
from specmm.metrics.extractors.clip import CLIP
from specmm.metrics.measurement import Measurement

SCALE, PAPER = 100.0, 2.5


def clip_score(
    pictures: Iterable[np.ndarray], texts: Iterable[str], model: CLIP, *, batch: int = 32
) -> Measurement:
    """CLIPScore of ``pictures`` [H, W, 3] uint8 and their ``texts``, with its 95% interval.

    Raises ``ValueError`` unless there are as many texts as pictures, and at least one.
    """
    scores = Mean()
    source = getattr(pictures, "protocol", {})
    for rows in batches(pairs(pictures, texts, "pictures and texts"), batch):
        shown, said = zip(*rows, strict=True)
        scores.update(cosines(model, list(shown), list(said)).clamp(min=0) * SCALE)
    protocol = {
        **model.protocol,
        **source,
        "scale": SCALE,
        "texts": "as given",
        "counts": [scores.count],
    }
    parts = {"paper_scale_2.5": scores.value * PAPER / SCALE}
    return Measurement("clip_score", scores.value, protocol, parts, scores.interval())


def cosines(model: CLIP, pictures: list[np.ndarray], texts: list[str]) -> torch.Tensor:
    """Cosine [n] float32 of each picture with its text."""
    shown = model.features(pictures, batch=len(pictures), progress=False).values
    return torch.cosine_similarity(shown, model.texts(texts))
