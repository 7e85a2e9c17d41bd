"""Neighbouring codes of an image tokenizer, and how much of a target's mass a draft may borrow from
them.

Source: LANTERN (Jang et al. 2025) and LANTERN++ (Park et al. 2025), equations of the relaxed
acceptance condition. Shape letters: B batch, F families, V vocabulary, W codes in the table, C code
width, J table columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 23  # distances between codes at a time


def neighbour_table(codebook: Tensor, columns: int) -> Tensor:
    """The ``columns`` nearest other codes of each code by L2 distance, nearest first: [W, columns]
    int64.

    ``codebook`` [W, C]: raw rows, not normalised. LANTERN's official residual reads k + 1 columns.
    """
    codes = len(codebook)
    if not 0 <= columns < codes:
        raise ValueError(f"columns must be in [0, {codes}) for {codes} codes, got {columns}")
    rows, step = codebook.double(), max(1, CHUNK // codes)
    nearest = []
    for start in range(0, codes, step):
        distance = torch.cdist(
            rows[start : start + step], rows, compute_mode="donot_use_mm_for_euclid_dist"
        )
        itself = torch.arange(start, start + len(distance), device=rows.device)[:, None]
        distance.scatter_(1, itself, torch.inf)
        nearest.append(distance.sort(dim=1, stable=True).indices[:, :columns])
    return torch.cat(nearest)


@dataclass(frozen=True)
class Neighbourhood:
    """The mass S_x a token borrows: S_j sums the target over its j nearest codes; the largest S_j
    <= bound, j <= k.

    The bound is ``delta`` (LANTERN) or, with ``factor``, ``(lambda - 1) target(x)`` (LANTERN++).
    Token ``offset + c`` is code c of ``table`` [W, J]; tokens that are no code borrow nothing.
    """

    table: Tensor
    k: int
    bound: float
    factor: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        codes, columns = self.table.shape
        if not 0 <= self.k <= columns:
            raise ValueError(
                f"k must be in [0, {columns}] for a table of {codes} x {columns}, got {self.k}"
            )

    def borrowed(self, target: Tensor, token: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """S of ``token`` [B, F] under ``target`` [B, F, V], and whether any neighbour qualifies:
        [B, F] both.

        ``own`` [B, F] is target(token).
        """
        if not self.k:
            return torch.zeros_like(own), torch.zeros_like(own, dtype=torch.bool)
        near, is_code = self.near(token, self.k)
        total = target.gather(-1, near).cumsum(-1)
        bound = (self.bound - 1) * own[..., None] if self.factor else self.bound
        over = (total > bound) | ~is_code[..., None]
        return total.masked_fill_(over, 0.0).amax(-1), ~over[..., 0]

    def near(self, token: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The first neighbours (ids [..., count]) of ``token`` [...], and whether it is a code at
        all [...].
        """
        code = token - self.offset
        is_code = (code >= 0) & (code < len(self.table))
        near = self.table[:, :count][code.clamp(0, len(self.table) - 1)]
        return near + self.offset if self.offset else near, is_code
