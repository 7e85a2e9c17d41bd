"""How well an autoencoder gives pictures back: PSNR, SSIM, LPIPS, and rFID between the originals
and what came out.

Pictures come in pairs, streamed; each pair has one size. PSNR and SSIM are of RGB values 0..255,
without a border cut off, and averaged over pictures (Wang et al. 2004: Gaussian window of 11
pixels, sigma 1.5, k1 0.01, k2 0.03).

Shapes: a picture [H, W, 3] uint8; pairs [n, 3, H, W] float of 0..255; scores [n].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from specmm.metrics.averages import Mean, pairs
from specmm.metrics.extractors.base import Extractor, batches, channels_first, checked
from specmm.metrics.features import Protocol
from specmm.metrics.frechet import FeatureStatistics, frechet_distance
from specmm.metrics.lpips import LPIPS
from specmm.metrics.measurement import Measurement

WINDOW = 11  # pixels of SSIM's Gaussian
EQUAL = 100.0  # dB that a picture without any error counts

Pairs = list[tuple[Tensor, Tensor]]
Score = Callable[[Tensor, Tensor], Tensor]
PSNR: Protocol = {"data_range": 255, "colours": "RGB", "equal_pictures": f"{EQUAL:g} dB"}
SSIM: Protocol = {"data_range": 255, "colours": "RGB", "window": f"gaussian {WINDOW}, sigma 1.5"}


def reconstruction(
    originals: Iterable[np.ndarray],
    reconstructions: Iterable[np.ndarray],
    *,
    lpips: LPIPS | None = None,
    extractor: Extractor | None = None,
    batch: int = 16,
) -> list[Measurement]:
    """PSNR and SSIM, with ``lpips`` LPIPS, and with an ``extractor`` rFID, of pictures [H, W, 3]
    uint8 in pairs.

    Memory does not depend on how many there are. Raises ``ValueError`` unless there are as many of
    both, and at least one, of the same sizes, of 11 pixels or more (LPIPS: 32).
    """
    scores: dict[str, tuple[Score, Protocol]] = {"psnr": (psnr, PSNR), "ssim": (ssim, SSIM)}
    if lpips is not None:
        scores["lpips"] = (lpips.distances, lpips.protocol)
    means = {name: Mean() for name in scores}
    sides: tuple[list[FeatureStatistics], list[FeatureStatistics]] = ([], [])
    for rows in batches(
        pairs(checked(originals), checked(reconstructions), "originals and reconstructions"), batch
    ):
        for first, second in _stacks(rows):
            for name, (score, _) in scores.items():
                means[name].update(score(first, second))
        if extractor is not None:
            for kept, pictures in zip(sides, zip(*rows, strict=True), strict=True):
                _add(kept, extractor, list(pictures))
    source = getattr(originals, "protocol", {})
    found = [_measurement(name, means[name], {**source, **scores[name][1]}) for name in scores]
    return [*found, _rfid(sides[0][0], sides[1][0], source)] if extractor is not None else found


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Peak signal-to-noise ratio [n], dB, of pairs [n, 3, H, W] of 0..255; ``EQUAL`` at most."""
    error = (first.double() - second.double()).square().mean((1, 2, 3))
    return (10 * (255**2 / error).log10()).clamp(max=EQUAL)


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Structural similarity [n] of pairs [n, 3, H, W] of 0..255, by torchmetrics.

    Raises ``ValueError`` for pictures smaller than the window, or where torchmetrics is missing.
    """
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError:
        raise ValueError(
            "SSIM needs torchmetrics, got none; run: pip install 'specmm[fid]'"
        ) from None
    if min(first.shape[2:]) < WINDOW:
        raise ValueError(
            f"SSIM needs pictures of at least {WINDOW} pixels, got {list(first.shape[2:])}; use larger ones"
        )
    pair = (
        second.double(),
        first.double(),
    )  # in float32 flat white areas of equal pictures lose 1e-4
    found = structural_similarity_index_measure(*pair, data_range=255.0, reduction="none")
    assert isinstance(found, Tensor)
    return found.reshape(-1)


def _stacks(rows: Pairs) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs stacked by size, as [n, 3, H, W] float; raises ``ValueError`` for a pair of two
    sizes.
    """
    sizes: dict[torch.Size, Pairs] = {}
    for one, two in rows:
        if one.shape != two.shape:
            got = f"{list(one.shape[:2])} and {list(two.shape[:2])}"
            raise ValueError(
                f"a picture and its reconstruction must have one size, got {got}; crop or resize one"
            )
        sizes.setdefault(one.shape, []).append((one, two))
    for group in sizes.values():
        first, second = (channels_first(torch.stack(side)) for side in zip(*group, strict=True))
        yield first, second


def _add(kept: list[FeatureStatistics], extractor: Extractor, pictures: list[Tensor]) -> None:
    """Add the features of ``pictures`` to the statistics in ``kept``, which holds them once their
    width is known.
    """
    for block in extractor.stream(pictures, batch=len(pictures)):
        if not kept:
            kept.append(FeatureStatistics.empty(block.values.shape[1]))
        kept[0].update(block)


def _measurement(name: str, mean: Mean, protocol: Protocol) -> Measurement:
    return Measurement(name, mean.value, {**protocol, "counts": [mean.count]}, {}, mean.interval())


def _rfid(first: FeatureStatistics, second: FeatureStatistics, source: Protocol) -> Measurement:
    found = frechet_distance(first, second)
    return Measurement("rfid", found.value, {**source, **found.protocol}, found.parts)
