"""Feature networks by name; each has a protocol that describes its measurements.

Shapes: a picture [H, W, 3] uint8, all of one size or of many; features [N, F]; logits [N, C].
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specmm import __version__
from specmm.extending.registry import Registry
from specmm.loading.hardware import dtype_name
from specmm.metrics.features import FeatureSet, Protocol

Pictures = np.ndarray | Tensor | Iterable[np.ndarray] | Iterable[Tensor]
Step = Callable[[Tensor], Tensor]
T = TypeVar("T")

EXTRACTORS = Registry(
    "extractor",
    {
        "inception": "specmm.metrics.networks:Inception",
        "inception-fidelity": "specmm.metrics.networks:FidelityInception",
        "efficientnet-lite0": "specmm.metrics.networks:EfficientNetLite0",
        "dinov2": "specmm.metrics.networks:DINOv2",
        "clip": "specmm.metrics.networks:CLIP",
    },
)


def extractor(
    name: str = "inception",
    *,
    weights: Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Extractor:
    """The extractor called ``name``; ``weights`` is its file, or a folder that holds it."""
    loaded: Extractor = EXTRACTORS.get(name)(weights=weights, device=device, dtype=dtype)
    return loaded


@dataclass(eq=False)
class Extractor:
    """A ``network`` to features [n, F] after ``prepare`` of pictures [n, H, W, 3] of one size.

    ``classifier``, if there is one, gives logits [n, C].
    """

    name: str
    protocol: Protocol
    prepare: Step
    network: Step
    classifier: Step | None = None
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        facts = {"dtype": dtype_name(self.dtype), "library": f"specmm {__version__}"}
        self.protocol = {**self.protocol, **facts}

    def features(self, pictures: Pictures, *, batch: int = 32, progress: bool = True) -> FeatureSet:
        """Features [N, F] float32, on the CPU; ``ValueError`` for other shapes or no pictures."""
        return joined(self.stream(pictures, batch=batch, progress=self.name if progress else None))

    def stream(
        self, pictures: Pictures, *, batch: int = 32, progress: str | None = None
    ) -> Iterator[FeatureSet]:
        """Features in blocks, in constant memory; ``progress``: the title of a progress bar."""
        return self._stream(pictures, self.network, self.protocol, batch, progress)

    def logits(self, pictures: Pictures, *, batch: int = 32, progress: bool = True) -> FeatureSet:
        """Class logits [N, C] float32; errors as ``features``, or for want of a classifier."""
        if self.classifier is None:
            raise ValueError(
                f"class logits need a classifier, got {self.name}, which has none; "
                "use the extractor efficientnet-lite0"
            )
        protocol = {**self.protocol, "features": f"{self.protocol['features']}, its logits"}
        title = self.name if progress else None
        return joined(self._stream(pictures, self.classifier, protocol, batch, title))

    def _stream(
        self, pictures: Pictures, network: Step, protocol: Protocol, batch: int, title: str | None
    ) -> Iterator[FeatureSet]:
        """Blocks of features of ``pictures`` by ``network``, ``batch`` pictures at a time."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        protocols = {**protocol, **getattr(pictures, "protocol", {})}
        total = operator.length_hint(pictures) or None
        with tqdm(total=total, desc=title, disable=title is None, unit="picture") as bar:
            for rows in batches(checked(pictures), batch):
                yield FeatureSet(self._run(rows, network), dict(protocols))
                bar.update(len(rows))

    @torch.inference_mode()
    def _run(self, rows: list[Tensor], network: Step) -> Tensor:
        """Features of one batch; pictures of several sizes are prepared one by one."""
        same = len({r.shape for r in rows}) == 1
        stacks = [torch.stack(rows)] if same else [r[None] for r in rows]
        ready = [self.prepare(s.to(self.device)) for s in stacks]
        if len({r.shape[1:] for r in ready}) == 1:  # else the network resizes by itself
            ready = [torch.cat(ready)]
        layout = torch.channels_last  # a quarter faster on CPUs in float32
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            # on a GPU convolutions of float32 would round to 10 bits, and features move
            out = [network(r.to(self.dtype, memory_format=layout)).float().cpu() for r in ready]
        return torch.cat(out)


def joined(blocks: Iterable[FeatureSet]) -> FeatureSet:
    """All blocks as one set."""
    pieces = list(blocks)
    return FeatureSet(torch.cat([b.values for b in pieces]), pieces[0].protocol)


def checked(pictures: Pictures) -> Iterator[Tensor]:
    """The pictures as tensors [H, W, 3]; ``ValueError`` for the first that is not uint8 RGB."""
    number = 0
    for number, picture in enumerate(pictures, 1):
        pixels = picture if isinstance(picture, Tensor) else torch.tensor(np.asarray(picture))
        rgb = pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.numel()
        if pixels.dtype != torch.uint8 or not rgb:
            got = f"{pixels.dtype} {list(pixels.shape)} (number {number})"
            raise ValueError(f"pictures must be uint8 [H, W, 3] of 0..255, got {got}")
        yield pixels
    if not number:
        raise ValueError("pictures must be uint8 [H, W, 3], got none; pass at least one")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """``items`` in lists of ``size``; the last list may be shorter."""
    source = iter(items)
    while rows := list(itertools.islice(source, size)):
        yield rows


def channels_first(pictures: Tensor) -> Tensor:
    """Pictures [n, H, W, 3] uint8 as [n, 3, H, W] float32 of 0..255."""
    return pictures.permute(0, 3, 1, 2).float()
