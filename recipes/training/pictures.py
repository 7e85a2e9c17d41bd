"""What the training of every family of image models shares: mirror images, how like two pictures
are, labelled batches.

Shape letters: B batch, M pictures, R pixels a side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.recipes.loop import batch_rows
from specmm.recipes.pictures import CLASS_DROPOUT

RESTART_EVERY = 200  # steps between two moves of unused codes


def flip_some(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each picture [B, 3, R, R] left to right with probability one half."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def reconstruction_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """L1 on pixels plus L1 on horizontal and vertical differences, of [B, 3, R, R]."""
    pixels = (made - wanted).abs().mean()
    edges = sum((made.diff(dim=d) - wanted.diff(dim=d)).abs().mean() for d in (-1, -2))
    return pixels + edges


def labelled_batch(
    tokens: Tensor, labels: Tensor, i: int, size: int, seed: int, nothing: int
) -> tuple[Tensor, Tensor]:
    """Labels [B], some of them ``nothing``, and tokens [B, ...] of step ``i``.

    ``tokens`` [M, 2, ...] are of pictures and of their mirror images, ``labels`` [M] their classes.
    """
    generator = torch.Generator().manual_seed(seed + i)
    rows = batch_rows(i, size, len(tokens), seed)
    mirrored = torch.randint(2, (size,), generator=generator)
    dropped = torch.rand(size, generator=generator) < CLASS_DROPOUT
    return labels[rows].masked_fill(dropped, nothing), tokens[rows, mirrored]
