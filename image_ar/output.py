"""What every image pipeline returns, and the loop over batches they share.

Shape letters: B pictures, R pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from specmm.stats import Certificate, Stats, merged_certificate, total

OUTPUT_TYPES = ("pil", "np", "latent")
Callback = Callable[[Any, int, int, dict[str, Any]], dict[str, Any]]


@dataclass
class ImageOutput(BaseOutput):  # type: ignore[misc]
    """``images`` (PIL, or uint8 [B, R, R, 3] arrays), ``tokens`` [B, …], ``stats``,
    ``certificate``, ``method``.
    """

    images: Any
    tokens: Tensor
    stats: Stats
    certificate: Certificate
    method: str


@dataclass
class Drawn:
    """One batch: ``tokens`` [B, …] as the family has them, ``images`` [B, R, R, 3] uint8 unless
    latents were asked for.

    ``measured`` is the number of tokens that the certificate's total variation is the mean of.
    """

    tokens: Tensor
    images: Tensor | None
    stats: Stats
    certificate: Certificate
    method: str
    measured: float = 1.0


def draw_batches(
    draw: Callable[[slice], Drawn],
    count: int,
    batch_size: int,
    output_type: str,
    bar: Any,
    settings: Mapping[str, Any],
) -> ImageOutput:
    """``draw`` the rows of ``count`` pictures, ``batch_size`` at a time, under a progress ``bar``
    (which ``draw`` may move for those that are finished before the others). ``settings`` are those
    the certificate is about.
    """
    parts = []
    with bar:
        for first in range(0, count, batch_size):
            parts.append(draw(slice(first, first + batch_size)))
            bar.update(first + len(parts[-1].tokens) - bar.n)
    stats = total([part.stats for part in parts])
    certificate = merged_certificate([(part.certificate, part.measured) for part in parts])
    assert certificate is not None, "there is at least one picture"
    drawn = [part.images for part in parts if part.images is not None]
    pictures: Any = torch.cat(drawn).cpu().numpy() if drawn else np.empty(0)
    images = [Image.fromarray(p) for p in pictures] if output_type == "pil" else pictures
    tokens = torch.cat([part.tokens for part in parts])
    claim = certificate.under(settings)
    return ImageOutput(
        images=images, tokens=tokens, stats=stats, certificate=claim, method=parts[-1].method
    )


def check_call(output_type: str, batch_size: int, num_images_per_prompt: int) -> None:
    """Raise ``ValueError`` for what no pipeline can do."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type must be 'pil', 'np' or 'latent', got {output_type!r}")
    if batch_size < 1 or num_images_per_prompt < 1:
        raise ValueError(
            f"batch_size and num_images_per_prompt must be at least 1, got {batch_size} and {num_images_per_prompt}"
        )
