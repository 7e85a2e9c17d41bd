"""Expected block efficiency of a tree shape from measured acceptance by rank (Sequoia, arXiv
2402.12374).

The positional model: given that a node is kept, its child of rank r is the one kept with
probability a[r], whatever the context. So a is a sub-distribution over ranks, and its sum is the
chance that the path goes on. A table per depth refines it.

Shape letters: B batch, N nodes, D deepest level, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmm.tree import TreeShape

Acceptance = Tensor | Sequence[float] | Sequence[Sequence[float]]


def rank_table(rank_acceptance: Acceptance, depth: int) -> Tensor:
    """The acceptance table [depth, K] float64 of ``rank_acceptance`` [K] (the same at every depth)
    or [D, K].

    Levels past D count as never kept. Raises ``ValueError`` when a row is not a sub-distribution.
    """
    table = torch.as_tensor(rank_acceptance, dtype=torch.float64, device="cpu")
    if table.ndim not in (1, 2) or table.numel() == 0:
        raise ValueError(f"rank acceptance must be [K] or [D, K], got shape {list(table.shape)}")
    if bool((table < 0).any() | (table.sum(-1) > 1 + 1e-6).any() | table.isnan().any()):
        raise ValueError(
            f"rank acceptance must be at least 0 and sum to at most 1 over ranks, got {table.tolist()}"
        )
    if table.ndim == 1:
        return table.expand(depth, -1)
    missing = max(0, depth - len(table))
    return torch.cat([table[:depth], table.new_zeros(missing, table.shape[1])])


def reach(shape: TreeShape, rank_acceptance: Acceptance) -> Tensor:
    """Probability that each node is on the accepted path, [1 or B, N] float64; 1 for the root."""
    table = rank_table(rank_acceptance, shape.depth)
    padded = torch.nn.functional.pad(table, (0, max(0, shape.width - table.shape[1])))
    padded = padded.to(shape.parents.device)
    step = (
        padded[(shape.depths - 1).clamp(min=0), shape.ranks]
        if shape.depth
        else torch.ones_like(shape.depths)
    )
    root = shape.parents < 0
    parents = shape.parents.clamp(min=0)
    kept = root.double()
    for _ in range(shape.depth):
        kept = torch.where(root, 1.0, step * kept.gather(1, parents))
    return kept


def expected_tau(shape: TreeShape, rank_acceptance: Acceptance) -> Tensor:
    """Expected tokens committed per round [1 or B] float64: the sum of ``reach``, the root standing
    for the last.
    """
    return reach(shape, rank_acceptance).sum(-1)
