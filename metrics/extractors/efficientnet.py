"""EfficientNet-lite0 features and class logits: the quick network, not the literature's (Tan and Le
2019).

The weights and the code come in packages (extra ``specmm[fid]``), converted from TensorFlow's
release: 224 pixels, values scaled by (x - 127) / 128. Numbers made with it compare with one another
only.

Shapes: features [N, 1280]; logits [N, 1000] of ImageNet's classes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specmm.metrics.extractors.base import Extractor, channels_first, pillow_bicubic
from specmm.metrics.weights import fingerprint, locate
from specmm.zoo.efficientnet import load_network

SIDE = 224  # pixels


class EfficientNetLite0(Extractor):
    """EfficientNet-lite0 as a feature extractor and classifier.

    Raises ``ValueError`` where the weights, or the package ``efficientnet-lite-pytorch``, are
    missing.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: Path | None = None,
    ) -> None:
        path = locate("efficientnet-lite0", weights)
        self._model = load_network(path).to(device, dtype)
        protocol = {
            "features": "efficientnet-lite0 pooled 1280",
            "weights": fingerprint(path),
            "resize": f"{SIDE} bicubic, antialias",
        }
        networks = (self._pooled, lambda x: self._model._fc(self._pooled(x)))
        super().__init__(
            "efficientnet-lite0", protocol, network_input, *networks, device=device, dtype=dtype
        )

    def _pooled(self, x: Tensor) -> Tensor:
        return self._model.extract_features(x).mean((2, 3))  # forward() would print


def network_input(pictures: Tensor) -> Tensor:
    """Pictures [n, H, W, 3] uint8 as [n, 3, 224, 224] in [-1, 1]."""
    return (pillow_bicubic(channels_first(pictures), SIDE) - 127) / 128
