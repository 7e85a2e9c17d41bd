"""The tree of a block's most probable paths (DDTree).

A block drafter has one marginal distribution per depth, independent of the path, so that its tree
costs one forward. It is a deterministic function of the prefix: its drafts are point masses, and
only a point-mass rule is exact.

Shape letters: B batch, D depths, V vocabulary, N nodes (the root included), W candidates kept a
level.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from specmm.core.sorting import largest
from specmm.core.tree import DraftTree
from specmm.shape.eagle2 import rerank


def block_tree(marginals: Tensor, root: Tensor, total: int) -> DraftTree:
    """The ``total`` most probable nodes under independent ``marginals`` [B, D, V], ``root`` [B].

    Exact and without a heap. Only the W = total - 1 best of a level can be kept or have kept
    children, and among the products of two descending lists the W best have (i + 1)(j + 1) <= W,
    which leaves about W ln W candidates a level.
    """
    count = total - 1
    if marginals.ndim != 3 or len(root) != len(marginals):
        raise ValueError(
            f"marginals must be [B, D, V] for {len(root)} roots, got {list(marginals.shape)}"
        )
    values, tokens = largest(marginals, min(count, marginals.shape[-1]))
    scores = values.log().clamp(max=0)  # [B, D, W]
    pool = [(scores[:, 0], tokens[:, 0], torch.full_like(tokens[:, 0], -1))]
    first = 0
    for depth in range(1, marginals.shape[1]):
        above = pool[-1][0]
        rows, columns = _pairs(above.shape[1], scores.shape[-1], count, str(marginals.device))
        products = above[:, rows] + scores[:, depth, columns]
        best = products.topk(min(count, products.shape[1]))
        added = tokens[:, depth][:, columns].gather(1, best.indices)
        pool.append((best.values, added, rows[best.indices] + first))
        first += above.shape[1]
    pool_scores, pool_tokens, pool_parents = (
        torch.cat(part, dim=1) for part in zip(*pool, strict=True)
    )
    bounds = {"depth": marginals.shape[1], "width": scores.shape[-1]}
    drafts, shape = rerank(pool_scores, pool_parents, pool_tokens, total, **bounds)
    return DraftTree(torch.cat([root.unsqueeze(1), drafts], dim=1), shape)


@lru_cache(maxsize=64)
def _pairs(rows: int, columns: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Index pairs of two descending lists that hold the ``count`` best products, row by row."""
    product = torch.arange(1, rows + 1)[:, None] * torch.arange(1, columns + 1)
    pairs = (product <= count).nonzero().to(device)
    return pairs[:, 0], pairs[:, 1]
