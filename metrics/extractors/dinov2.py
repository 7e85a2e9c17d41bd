"""DINOv2 features for FD-DINOv2 (Stein et al. 2023, "Exposing flaws of generative model evaluation
metrics").

The class token of timm's ViT-L/14 at 224 pixels after Pillow's bicubic on floats. timm resamples
the position embedding its own way, which the protocol says: compare with others' numbers to the
leading digits only.

Shapes: features [N, F], F = 1024 for the large network.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.metrics.extractors.base import Extractor, channels_first, pillow_bicubic
from specmm.metrics.weights import fingerprint, locate, main_file

SIDE = 224  # pixels: 16 patches of 14
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class DINOv2(Extractor):
    """timm's DINOv2 as a feature extractor; ``weights`` is a folder with ``config.json`` and
    ``model.safetensors``.

    Raises ``ValueError`` where the weights or the package ``timm`` are missing.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: Path | None = None,
    ) -> None:
        folder = locate("dinov2", weights)
        model, version = _load(folder)
        name = model.pretrained_cfg.get("architecture", "dinov2")
        protocol = {
            "features": f"{name} class token {model.num_features}",
            "weights": fingerprint(main_file(folder)),
            "resize": f"{SIDE} bicubic pillow on floats, antialias",
            "positions": f"resampled by timm {version}",
        }
        super().__init__(
            "dinov2", protocol, network_input, model.to(device, dtype), device=device, dtype=dtype
        )


def network_input(pictures: Tensor) -> Tensor:
    """Pictures [n, H, W, 3] uint8 as [n, 3, 224, 224], normalised as ImageNet's."""
    x = pillow_bicubic(channels_first(pictures), SIDE) / 255
    mean, std = (x.new_tensor(v)[:, None, None] for v in (MEAN, STD))
    return (x - mean) / std


def _load(folder: Path) -> tuple[Any, str]:
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise ValueError(
            "DINOv2 needs the package timm, got none; run: pip install 'specmm[fid]'"
        ) from None
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0, img_size=SIDE)
    return model.eval(), timm.__version__
