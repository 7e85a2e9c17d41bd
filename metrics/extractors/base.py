"""What every extractor does: pictures through a network in batches, and a protocol that says what
was measured.

Shapes: a picture [H, W, 3] uint8, all of one size or of many; features [N, F]; logits [N, C].
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import specmm
from specmm.metrics.features import FeatureSet, Protocol

Pictures = np.ndarray | Tensor | Iterable[np.ndarray] | Iterable[Tensor]
T = TypeVar("T")
Step = Callable[[Tensor], Tensor]


class Extractor:
    """A ``network`` after ``prepare``, which resizes and scales equal-sized pictures [n, H, W, 3]
    uint8 for it.

    The network maps what ``prepare`` gives to features [n, F]; ``classifier``, where there is one,
    to logits [n, C].
    """

    def __init__(
        self,
        name: str,
        protocol: Protocol,
        prepare: Step,
        network: Step,
        classifier: Step | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name, self.prepare, self.network, self.classifier = name, prepare, network, classifier
        self.device, self.dtype = torch.device(device), dtype
        self.protocol: Protocol = {
            **protocol,
            "dtype": str(dtype).removeprefix("torch."),
            "library": f"specmm {specmm.__version__}",
        }

    def features(self, pictures: Pictures, *, batch: int = 32, progress: bool = True) -> FeatureSet:
        """Features [N, F] float32, on the CPU, of ``pictures``.

        Raises ``ValueError`` for other types or shapes, or no pictures.
        """
        return _gather(self.stream(pictures, batch=batch), pictures, self.name, progress)

    def stream(self, pictures: Pictures, *, batch: int = 32) -> Iterator[FeatureSet]:
        """The same in blocks of ``batch`` pictures, in memory that does not depend on how many
        there are.
        """
        return self._stream(pictures, self.network, self.protocol, batch)

    def logits(self, pictures: Pictures, *, batch: int = 32, progress: bool = True) -> FeatureSet:
        """Logits [N, C] float32 of the classes; raises ``ValueError`` also where the network has no
        classifier.
        """
        if self.classifier is None:
            raise ValueError(
                f"class logits need a classifier, got {self.name}, which has none; use the extractor efficientnet-lite0"
            )
        protocol = {**self.protocol, "features": f"{self.protocol['features']}, its logits"}
        return _gather(
            self._stream(pictures, self.classifier, protocol, batch), pictures, self.name, progress
        )

    def _stream(
        self, pictures: Pictures, network: Step, protocol: Protocol, batch: int
    ) -> Iterator[FeatureSet]:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        whole = {**protocol, **getattr(pictures, "protocol", {})}
        for rows in batches(checked(pictures), batch):
            yield FeatureSet(self._run(rows, network), dict(whole))

    @torch.inference_mode()
    def _run(self, rows: list[Tensor], network: Step) -> Tensor:
        same = len({r.shape for r in rows}) == 1
        stacks = [torch.stack(rows)] if same else [r[None] for r in rows]
        ready = [self.prepare(s.to(self.device)) for s in stacks]
        if len({r.shape[1:] for r in ready}) == 1:  # else the network resizes by itself
            ready = [torch.cat(ready)]
        layout = torch.channels_last  # a quarter faster on CPUs in float32
        return torch.cat(
            [network(r.to(self.dtype, memory_format=layout)).float().cpu() for r in ready]
        )


def checked(pictures: Pictures) -> Iterator[Tensor]:
    """The ``pictures`` as tensors [H, W, 3]; raises ``ValueError`` for the first that is no uint8
    RGB picture.
    """
    number = 0
    for number, picture in enumerate(pictures, 1):
        found = picture if isinstance(picture, Tensor) else torch.tensor(np.asarray(picture))
        if (
            found.dtype != torch.uint8
            or found.ndim != 3
            or found.shape[2] != 3
            or not found.numel()
        ):
            got = f"{found.dtype} {list(found.shape)} (number {number})"
            raise ValueError(
                f"pictures must be uint8 [H, W, 3], got {got}; scale to 0..255, channels last"
            )
        yield found
    if not number:
        raise ValueError("pictures must be uint8 [H, W, 3], got none; pass at least one")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` of the ``items``, the last one perhaps shorter."""
    source = iter(items)
    while rows := list(itertools.islice(source, size)):
        yield rows


def channels_first(pictures: Tensor) -> Tensor:
    """Pictures [n, H, W, 3] uint8 as [n, 3, H, W] float32 of 0..255."""
    return pictures.permute(0, 3, 1, 2).float()


def pillow_bicubic(pictures: Tensor, side: int) -> Tensor:
    """Resize [n, 3, H, W] of 0..255 to [n, 3, side, side] as Pillow's bicubic on floats does,
    antialiased, clipped.
    """
    resized = torch.nn.functional.interpolate(
        pictures, (side, side), mode="bicubic", antialias=True
    )
    return resized.clamp(0, 255)


def _gather(
    blocks: Iterator[FeatureSet], pictures: Pictures, name: str, progress: bool
) -> FeatureSet:
    found: list[FeatureSet] = []
    total = operator.length_hint(pictures) or None
    with tqdm(total=total, desc=name, disable=not progress, unit="picture") as bar:
        for block in blocks:
            found.append(block)
            bar.update(len(block))
    return FeatureSet(torch.cat([b.values for b in found]), found[0].protocol)
