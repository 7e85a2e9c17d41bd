"""What a block drafter's levels may know of the picture around the cells that they draft.

Shape letters: B batch, W places, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specmm.drawing import Sizes


class Surroundings(nn.Module):
    """What levels know of the picture around their cells, added after the layers."""

    def __init__(self, target: Sizes) -> None:
        super().__init__()
        self.row = nn.Embedding(target.rows, target.dim)
        self.column = nn.Embedding(target.columns, target.dim)
        self.above = nn.Linear(3 * target.dim, target.dim, bias=False)

    def forward(self, embedded: Tensor, cells: Tensor, columns: int) -> Tensor:
        """[..., C] of the tokens ``embedded`` [..., 3, C] above raster ``cells`` [...] of a picture
        of so many ``columns``; zeros stand for tokens that there are not.
        """
        row = self.row((cells // columns).clamp(max=self.row.num_embeddings - 1))
        column = self.column((cells % columns).clamp(max=self.column.num_embeddings - 1))
        return row + column + self.above(embedded.flatten(-2))


def tokens_above(places: Tensor, known: Tensor, line: int) -> tuple[Tensor, Tensor]:
    """The three places [B, W, 3] above each of ``places`` [B, W], to the left, straight and to the
    right, in rows of ``line`` tokens; and which of them there are up to ``known`` [B, 1 or W].
    """
    sides = torch.arange(-1, 2, device=places.device)
    above = places[..., None] - line + sides
    column = (places % line)[..., None] + sides
    there = (above >= 0) & (column >= 0) & (column < line)
    return above, there & (above <= known[..., None])
