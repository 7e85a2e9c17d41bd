"""Best-first trees: the N most probable paths under the draft, a greedy heap on products of draft
probabilities.

DySpec (arXiv 2410.11744) pops one node at a time; a block drafter's tree (DDTree) has one marginal
distribution a depth, whatever the path, so the whole tree costs one forward. Both are deterministic
functions of the prefix: their drafts are point masses, and only a point-mass rule is exact.

Shape letters: B batch, D depths, V vocabulary, N nodes (the root included), W candidates kept a
level.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from specmm.shape.eagle2 import rerank
from specmm.tree import DraftTree, TreeShape

ToProbs = Callable[[tuple[int, ...]], Tensor]


def best_first(probs: ToProbs, root: int, total: int, max_depth: int, width: int) -> DraftTree:
    """The ``total`` most probable paths, for one row: ``probs(path)`` is the draft distribution [V]
    after the drafts ``path``.

    DySpec's heap with its top ``width`` children a node in place of draws. One drafter call for
    each node that gets children: the reference for the level-by-level trees, and the choice when
    the drafter is a table.
    """
    tokens, parents = [root], [-1]
    heap: list[
        tuple[float, int, int, tuple[int, ...]]
    ] = []  # minus the path product, order, parent, path
    pushed = 0

    def push(node: int, path: tuple[int, ...], product: float) -> None:
        nonlocal pushed
        if len(path) < max_depth:
            best = probs(path).topk(width)
            for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                pushed += 1
                heapq.heappush(heap, (-product * probability, pushed, node, (*path, token)))

    push(0, (), 1.0)
    while heap and len(tokens) < total:
        product, _, parent, path = heapq.heappop(heap)
        tokens.append(path[-1])
        parents.append(parent)
        push(len(tokens) - 1, path, -product)
    return DraftTree(torch.tensor([tokens]), TreeShape.from_parents(parents))


def block_tree(marginals: Tensor, root: Tensor, total: int) -> DraftTree:
    """The ``total``-node tree of most probable paths under independent ``marginals`` [B, D, V],
    below ``root`` [B].

    Exact and without a heap. Only the W = total - 1 best of a level can be kept or have kept
    children, and among the products of two descending lists the W best have (i + 1)(j + 1) <= W,
    which leaves about W ln W candidates a level.
    """
    count = total - 1
    if marginals.ndim != 3 or len(root) != len(marginals):
        raise ValueError(
            f"marginals must be [B, D, V] for {len(root)} roots, got {list(marginals.shape)}"
        )
    best = marginals.topk(min(count, marginals.shape[-1]))
    scores, tokens = best.values.log().clamp(max=0), best.indices  # [B, D, W]
    pool = [(scores[:, 0], tokens[:, 0], torch.full_like(tokens[:, 0], -1))]
    first = 0
    for depth in range(1, marginals.shape[1]):
        above = pool[-1][0]
        rows, columns = _pairs(above.shape[1], scores.shape[-1], count, str(marginals.device))
        products = above[:, rows] + scores[:, depth, columns]
        kept = products.topk(min(count, products.shape[1]))
        pool.append(
            (
                kept.values,
                tokens[:, depth][:, columns].gather(1, kept.indices),
                rows[kept.indices] + first,
            )
        )
        first += above.shape[1]
    pool_scores, pool_tokens, pool_parents = (
        torch.cat(part, dim=1) for part in zip(*pool, strict=True)
    )
    drafts, shape = rerank(
        pool_scores,
        pool_parents,
        pool_tokens,
        total,
        depth=marginals.shape[1],
        width=scores.shape[-1],
    )
    return DraftTree(torch.cat([root.unsqueeze(1), drafts], dim=1), shape)


@lru_cache(maxsize=64)
def _pairs(rows: int, columns: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Index pairs of two descending lists among which the ``count`` best products lie, row by row."""
    product = torch.arange(1, rows + 1)[:, None] * torch.arange(1, columns + 1)
    pairs = (product <= count).nonzero().to(device)
    return pairs[:, 0], pairs[:, 1]


def block_tree_heap(marginals: Tensor, root: int, total: int) -> DraftTree:
    """``block_tree`` for one row, ``marginals`` [D, V], as DDTree states it: a heap over paths of
    ranks, on the host.

    A path of ranks is followed by its next sibling and its first child, so each path is pushed once
    and after a better one.
    """
    best = marginals.sort(dim=-1, descending=True, stable=True)
    probs, ids = best.values.tolist(), best.indices.tolist()
    tokens, parents = [root], [-1]
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-probs[0][0], (0,), 0, 1.0)]
    while heap and len(tokens) < total:
        product, path, parent, above = heapq.heappop(heap)
        depth, rank = len(path), path[-1]
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        if rank + 1 < len(probs[0]):
            heapq.heappush(
                heap, (-above * probs[depth - 1][rank + 1], (*path[:-1], rank + 1), parent, above)
            )
        if depth < len(probs):
            heapq.heappush(heap, (product * probs[depth][0], (*path, 0), len(tokens) - 1, -product))
    return DraftTree(torch.tensor([tokens]), TreeShape.from_parents(parents))
