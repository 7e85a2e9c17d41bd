"""Compresses the slots of a picture to a few, so that a small head need not search hundreds of
similar ones and has a smaller cache.

Each learned query attends to all slots of one picture; the results take the picture's last places.
Source: ViSpec (arXiv 2509.15235). Its adaptor reads the projected picture; here slots also hold the
target's states. ViSpec also adds a vector of the picture to all later text; we do not, because the
target's states of that text have already seen the picture.

Shape letters: B batch, L slots, M slots that remain, W width of a slot, n slots of a picture.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PictureSlots(nn.Module):
    """``count`` n slots of ``width`` W for every unbroken run of a picture's places.

    A shorter run keeps its number of slots.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.queries = nn.Parameter(torch.zeros(count, width))

    def forward(self, slots: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """Compress ``slots`` [B, L, W], of pictures where ``image`` [B, L] bool. Returns the slots
        that remain [B, M, W], in order and padded at the right, and the mask ``kept`` [B, L] of
        their places.
        """
        left = _left(image, self.count + 1)
        kept = left <= self.count
        begins = image & ~F.pad(image[:, :-1], (1, 0))
        place = torch.arange(image.shape[1], device=image.device)
        # which slots are read together: a picture's, while text reads but itself
        group = torch.where(image, begins.cumsum(1), -1 - place)
        seen = packed(group, kept)[:, :, None] == group[:, None]  # [B, M, L]
        queries = self.queries[packed(left, kept).clamp(1, self.count) - 1]
        keys = F.rms_norm(slots, slots.shape[-1:])
        found = F.scaled_dot_product_attention(
            queries.to(slots.dtype)[:, None],
            keys[:, None],
            slots[:, None],
            seen[:, None],
            scale=1.0,
        )
        return found[:, 0], kept


def _left(image: Tensor, most: int) -> Tensor:
    """Remaining places of each place's run in ``image`` [B, L], itself included, at most ``most``;
    0 for text.
    """
    ahead = F.pad(image, (0, most - 1)).unfold(1, most, 1)  # [B, L, most]
    return ahead.long().cumprod(-1).sum(-1)


def packed(x: Tensor, kept: Tensor) -> Tensor:
    """Entries of ``x`` [B, L, ...] at the places ``kept`` [B, L], moved to the front [B, M, ...].

    Rows with fewer such places are padded with their other entries.
    """
    count = int(kept.sum(1).max())
    order = kept.logical_not().long().argsort(dim=1, stable=True)[:, :count]
    return x[torch.arange(len(x), device=x.device)[:, None], order]
