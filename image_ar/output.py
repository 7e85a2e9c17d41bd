"""What every image pipeline returns, and the loop over batches they share.

Shape letters: B pictures, R pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from specmm import methods
from specmm.certificate import Certificate, merged
from specmm.stats import Stats, total

OUTPUT_TYPES = ("pil", "np", "latent")
M = TypeVar("M", bound=methods.Declared)
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


class PicturePipeline(Generic[M]):
    """What an image pipeline of any family declares, so that nobody asks its type."""

    transformer: Any
    settings: Any
    parts: Any  # drafters and plans, of token models
    sampling_options: ClassVar[tuple[str, ...]]  # of ``target``, and of a call
    compiles: ClassVar[bool] = False  # whether calls take ``compiled``
    plans: ClassVar[Literal["trees", "scales"] | None] = None  # what ``specmm plan`` measures
    log_likelihood: Any = None  # of tokens under the target, where they have one

    def __call__(self, *args: Any, **options: Any) -> ImageOutput:
        """Draw pictures; every family says of what and how."""
        raise NotImplementedError

    def target(self, *args: Any, **options: Any) -> Any:
        """How pictures are drawn under ``options``, which may be any ``sampling_options``."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        raise NotImplementedError

    @property
    def takes(self) -> Literal["classes", "prompt"]:
        """What a picture is drawn from."""
        return "classes"

    @property
    def grid(self) -> int:
        """Tokens along a side of a picture that is drawn token by token, else 0."""
        return 0

    def timed(self, method: M) -> bool:
        """Whether what ``method`` draws depends on seconds measured on this machine."""
        return method.timed

    def runnable(self, usual: list[M]) -> list[M]:
        """Those of the ``usual`` methods that this model has a drafter or a small model for."""
        return list(usual)

    def settle(self, method: M, batch: int, sampling: Any) -> tuple[M, str]:
        """``method`` with what it leaves open decided for ``batch`` pictures at once, and why.

        Methods that decide during the call are left as they are.
        """
        return method, ""


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
    certificate = merged([(part.certificate, part.measured) for part in parts])
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
