"""Scores of pictures in pairs with their originals or their texts, streamed.

Against originals, as an autoencoder gives them back: PSNR, SSIM (Wang et al. 2004), and rFID
of both sides, of RGB values 0..255 without a border cut off, averaged over pictures.

Against texts: CLIPScore (Hessel et al. 2021, eq. 1), w max(cos(picture, text), 0) with w = 100 as
torchmetrics and most tables print it; the paper's w = 2.5 is in ``parts``. The paper's prefix "A
photo depicts" is left to the caller.

Shapes: a picture [H, W, 3] uint8; pairs [n, 3, H, W] float of 0..255; scores [n].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from specmm.loading.extras import needed
from specmm.metrics.extractors import Extractor, batches, channels_first, checked
from specmm.metrics.features import Protocol
from specmm.metrics.frechet import FeatureStatistics, frechet_distance
from specmm.metrics.intervals import LEVEL
from specmm.metrics.measurement import Interval, Measurement
from specmm.metrics.networks import CLIP

WINDOW = 11  # pixels of SSIM's Gaussian
EQUAL = 100.0  # dB that a picture without any error counts
SCALE = 100.0  # CLIPScore's w
PAPER_SCALE = 2.5

T = TypeVar("T")
U = TypeVar("U")
Score = Callable[[Tensor, Tensor], Tensor]
PSNR: Protocol = {"data_range": 255, "colours": "RGB", "equal_pictures": f"{EQUAL:g} dB"}
SSIM: Protocol = {"data_range": 255, "colours": "RGB", "window": f"gaussian {WINDOW}, sigma 1.5"}


def reconstruction(
    originals: Iterable[np.ndarray],
    reconstructions: Iterable[np.ndarray],
    *,
    extractor: Extractor | None = None,
    batch: int = 16,
) -> list[Measurement]:
    """PSNR, SSIM and (by ``extractor``) rFID of pairs [H, W, 3] uint8 of one size, 11 or more."""
    metrics: dict[str, tuple[Score, Protocol]] = {"psnr": (psnr, PSNR), "ssim": (ssim, SSIM)}
    scores: dict[str, list[Tensor]] = {name: [] for name in metrics}
    sides: dict[int, FeatureStatistics] = {}  # 0: originals, 1: reconstructions
    both = pairs(checked(originals), checked(reconstructions), "originals and reconstructions")
    for rows in batches(both, batch):
        for first, second in _stacks(rows):
            for name, (score, _) in metrics.items():
                scores[name].append(score(first, second))
        if extractor is not None:
            for side, pictures in enumerate(zip(*rows, strict=True)):
                block = extractor.features(pictures, batch=batch, progress=False)
                if side not in sides:
                    sides[side] = FeatureStatistics.empty(block.values.shape[1])
                sides[side].update(block)
    source = getattr(originals, "protocol", {})
    measurements = [
        _mean(name, torch.cat(scores[name]), {**source, **protocol})
        for name, (_, protocol) in metrics.items()
    ]
    if extractor is not None:
        fid = frechet_distance(sides[0], sides[1])
        measurements.append(Measurement("rfid", fid.value, {**source, **fid.protocol}, fid.parts))
    return measurements


def clip_score(
    pictures: Iterable[np.ndarray], texts: Iterable[str], model: CLIP, *, batch: int = 32
) -> Measurement:
    """CLIPScore of ``pictures`` [H, W, 3] uint8 and their ``texts``, with its 95% interval."""
    scores = []
    source = getattr(pictures, "protocol", {})
    for rows in batches(pairs(pictures, texts, "pictures and texts"), batch):
        features = model.features([p for p, _ in rows], batch=batch, progress=False).values
        cosines = torch.cosine_similarity(features, model.texts([t for _, t in rows]))
        scores.append(cosines.clamp(min=0) * SCALE)
    protocol = {**model.protocol, **source, "scale": SCALE, "texts": "as given"}
    measurement = _mean("clip_score", torch.cat(scores), protocol)
    return replace(measurement, parts={"paper_scale_2.5": measurement.value * PAPER_SCALE / SCALE})


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Peak signal-to-noise ratio [n], dB, at most ``EQUAL``, of pairs [n, 3, H, W] of 0..255."""
    error = (first.double() - second.double()).square().mean((1, 2, 3))
    return (10 * (255**2 / error).log10()).clamp(max=EQUAL)


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Structural similarity [n] of pairs [n, 3, H, W] of 0..255, by torchmetrics, in float64."""
    with needed("SSIM", "fid"):
        from torchmetrics.functional.image import structural_similarity_index_measure as measure
    if min(first.shape[2:]) < WINDOW:
        got = list(first.shape[2:])
        raise ValueError(f"SSIM needs pictures of at least {WINDOW} pixels, got {got}")
    # in float32 flat white areas of equal pictures lose 1e-4
    scores = measure(second.double(), first.double(), data_range=255.0, reduction="none")
    assert isinstance(scores, Tensor)
    return scores.reshape(-1)


def pairs(first: Iterable[T], second: Iterable[U], what: str) -> Iterator[tuple[T, U]]:
    """Both streams side by side; raises ``ValueError`` where one ends early or both are empty."""
    end = object()
    number = 0
    for number, (one, two) in enumerate(itertools.zip_longest(first, second, fillvalue=end), 1):
        if one is end or two is end:
            longer = "first" if two is end else "second"
            raise ValueError(
                f"there must be equally many {what}, got no partner for number {number} of the "
                f"{longer}"
            )
        yield one, two  # type: ignore[misc]  # neither is the end
    if not number:
        raise ValueError(f"{what} must be at least one pair, got none; pass some")


def _stacks(rows: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of one size stacked as [n, 3, H, W]; ``ValueError`` for pairs of two sizes."""
    sizes: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for one, two in rows:
        if one.shape != two.shape:
            got = f"{list(one.shape[:2])} and {list(two.shape[:2])}"
            raise ValueError(f"a picture and its reconstruction must have one size, got {got}")
        sizes.setdefault(one.shape, []).append((one, two))
    for group in sizes.values():
        first, second = (channels_first(torch.stack(side)) for side in zip(*group, strict=True))
        yield first, second


def _mean(metric: str, scores: Tensor, protocol: Protocol) -> Measurement:
    """The mean of ``scores`` [N] with its normal interval, None for a single score."""
    exact = scores.double()
    value = float(exact.mean())
    interval = None
    if len(exact) > 1:
        reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * float(exact.std()) / math.sqrt(len(exact))
        interval = Interval(value - reach, value + reach, LEVEL, f"normal, {len(exact)} pairs")
    return Measurement(metric, value, {**protocol, "counts": [len(exact)]}, interval=interval)
