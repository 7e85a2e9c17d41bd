"""The FID Inception as torch-fidelity loads it (Obukhov et al. 2020), for its class logits: the
literature's Inception Score. It needs the package torch-fidelity and weights that come in no
package; nothing is downloaded.

Shapes: features [N, 2048]; logits [N, 1008], without the bias, as the score is defined.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from torch import Tensor

from specmm.metrics.extractors.base import Extractor
from specmm.metrics.weights import fingerprint, locate


class FidelityInception(Extractor):
    """torch-fidelity's Inception as an extractor and classifier, in float32.

    Raises ``ValueError`` for another ``dtype``, or where the weights or the package are missing.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: Path | None = None,
    ) -> None:
        if dtype != torch.float32:
            raise ValueError(
                f"torch-fidelity's Inception runs in torch.float32, got {dtype}; leave dtype out"
            )
        path = locate("inception-fidelity", weights)
        try:
            module = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
        except ImportError:
            raise ValueError(
                "this Inception needs the package torch-fidelity, got none; run: pip install torch-fidelity"
            ) from None
        wanted = ["2048", "logits_unbiased"]
        model = module.FeatureExtractorInceptionV3(
            "inception", wanted, feature_extractor_weights_path=path
        ).to(device)
        protocol = {
            "features": "inception-2015-12-05 pool3 2048 by torch-fidelity",
            "weights": fingerprint(path),
            "resize": "299 bilinear tensorflow-1, no antialias",
        }
        heads = (lambda x: model(x.byte())[0], lambda x: model(x.byte())[1])
        super().__init__(
            "inception-fidelity", protocol, channels_first_bytes, *heads, device=device
        )


def channels_first_bytes(pictures: Tensor) -> Tensor:
    """Pictures [n, H, W, 3] as the network takes them: [n, 3, H, W] uint8; it resizes and scales
    itself.
    """
    return pictures.permute(0, 3, 1, 2)
