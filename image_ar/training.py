"""What the training of every family of image models shares: pictures as tensors, mirror images, dropped classes.

Shape letters: B batch, M pictures, R pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import trange

from specmm.training import batch_rows

CLASS_DROPOUT = 0.1  # share of samples trained as "no class", which guidance needs
RESTART_EVERY = 200  # steps between two moves of unused codes


def to_float(images: Tensor) -> Tensor:
    """Pictures [B, R, R, 3] uint8 -> [B, 3, R, R] float in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def flip_some(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each picture [B, 3, R, R] left to right with probability one half."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def reconstruction_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """L1 on pixels plus L1 on horizontal and vertical differences, of [B, 3, R, R]."""
    pixels = (made - wanted).abs().mean()
    edges = sum((made.diff(dim=d) - wanted.diff(dim=d)).abs().mean() for d in (-1, -2))
    return pixels + edges


@torch.no_grad()
def encode_views(encode: Callable[[Tensor], Tensor], images: Tensor, batch: int = 64) -> Tensor:
    """What ``encode`` makes of pictures [M, R, R, 3] uint8 and of their mirror images, [M, 2, ...]."""
    rows = []
    for first in trange(0, len(images), batch, desc="encode", mininterval=5):
        x = to_float(images[first : first + batch])
        rows.append(torch.stack([encode(view) for view in (x, x.flip(-1))], dim=1))
    return torch.cat(rows)


def labelled_batch(tokens: Tensor, labels: Tensor, i: int, size: int, seed: int, nothing: int) -> tuple[Tensor, Tensor]:
    """Labels [B], some of them ``nothing``, and tokens [B, ...] of step ``i``.

    ``tokens`` [M, 2, ...] are of pictures and of their mirror images, ``labels`` [M] their classes.
    """
    generator = torch.Generator().manual_seed(seed + i)
    rows = batch_rows(i, size, len(tokens), seed)
    mirrored = torch.randint(2, (size,), generator=generator)
    dropped = torch.rand(size, generator=generator) < CLASS_DROPOUT
    return labels[rows].masked_fill(dropped, nothing), tokens[rows, mirrored]
