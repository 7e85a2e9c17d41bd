"""Pictures as tensors and as what a tokenizer encodes them to, for trainings.

Shape letters: B batch, M pictures, R pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import trange

CLASS_DROPOUT = 0.1  # share of samples trained as "no class", which guidance needs


def to_float(images: Tensor) -> Tensor:
    """Pictures [B, R, R, 3] uint8 -> [B, 3, R, R] float in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def encode_views(encode: Callable[[Tensor], Tensor], images: Tensor, batch: int = 64) -> Tensor:
    """Pictures [M, R, R, 3] uint8 and their mirror images, encoded: [M, 2, ...]."""
    rows = []
    for first in trange(0, len(images), batch, desc="encode", mininterval=5):
        x = to_float(images[first : first + batch])
        rows.append(torch.stack([encode(view) for view in (x, x.flip(-1))], dim=1))
    return torch.cat(rows)
