"""Pictures as rows of tokens: a place's neighbours.

Places are numbered in raster order. A row of ``line`` tokens has ``columns`` picture tokens and
then, in some models, one that ends it.

Shape letters: B batch, W places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.core.drawing import DrawingTarget


def left_neighbours(places: Tensor, known: Tensor, target: DrawingTarget) -> Tensor:
    """The nearest place to the left of each of ``places`` [B, W] up to ``known`` [B].

    Where a row has none yet, and for tokens that end a row: as :func:`upper_neighbours`.
    """
    left = torch.minimum(places - 1, known[:, None])
    column = places % target.line
    inside = (left >= places - column) & (column < target.columns)
    return torch.where(inside, left, upper_neighbours(places, known, target))


def upper_neighbours(places: Tensor, known: Tensor, target: DrawingTarget) -> Tensor:
    """The nearest place above each of ``places`` [B, W] up to ``known`` [B].

    Where there is none: the latest known, or -1 for a token that ends the row.
    """
    latest = known[:, None]
    above = places - target.line
    ahead = (above - latest).clamp(min=0)  # as many rows up as it takes to be known
    above = above - (ahead + target.line - 1) // target.line * target.line
    if target.columns < target.line:
        latest = torch.where(places % target.line < target.columns, latest, -1)
    return torch.where(above >= 0, above, latest)
