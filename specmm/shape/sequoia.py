"""Sequoia (arXiv 2402.12374): the value of a tree by measured acceptance, and the best tree.

The positional model: if a node is accepted, its child of rank r is the accepted child with
probability a[r], whatever the context. So a is a sub-distribution over ranks, and its sum is the
chance that the path continues. A table with a separate a for each depth refines it. A tree's value
is the sum over its nodes of the product of a[rank] along the path. The best tree under a node
splits its budget among the children, rank by rank: a dynamic programme, run once, on the host.

Shape letters: B batch, N nodes (the root included), D deepest level, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specmm.core.tree import TreeShape

Acceptance = Tensor | Sequence[float] | Sequence[Sequence[float]]
Array = NDArray[np.float64]
Splits = list[list[NDArray[np.int64]]]  # [depth][rank][budget left] -> nodes given to that child


def rank_table(rank_acceptance: Acceptance, depth: int) -> Tensor:
    """The table [depth, K] float64 of ``rank_acceptance``, [K] for all depths or [D, K].

    Levels past D count as never accepted. Raises ``ValueError`` if a row is not a sub-distribution.
    """
    table = torch.as_tensor(rank_acceptance, dtype=torch.float64, device="cpu")
    if table.ndim not in (1, 2) or table.numel() == 0:
        raise ValueError(f"rank acceptance must be [K] or [D, K], got shape {list(table.shape)}")
    if bool((table < 0).any() | (table.sum(-1) > 1 + 1e-6).any() | table.isnan().any()):
        raise ValueError(
            "rank acceptance must be at least 0 and sum to at most 1 over ranks, "
            f"got {table.tolist()}"
        )
    if table.ndim == 1:
        return table.expand(depth, -1)
    missing = max(0, depth - len(table))
    return torch.cat([table[:depth], table.new_zeros(missing, table.shape[1])])


def reach(shape: TreeShape, rank_acceptance: Acceptance) -> Tensor:
    """Probability that each node is on the accepted path, [1 or B, N] float64; 1 for the root."""
    table = rank_table(rank_acceptance, shape.depth)
    padded = F.pad(table, (0, max(0, shape.width - table.shape[1]))).to(shape.parents.device)
    step = torch.ones_like(shape.depths, dtype=torch.float64)
    if shape.depth:
        step = padded[(shape.depths - 1).clamp(min=0), shape.ranks]
    root = shape.parents < 0
    parents = shape.parents.clamp(min=0)
    reached = root.double()
    for _ in range(shape.depth):
        reached = torch.where(root, 1.0, step * reached.gather(1, parents))
    return reached


def expected_tau(shape: TreeShape, rank_acceptance: Acceptance) -> Tensor:
    """Expected tokens committed per round, [1 or B] float64.

    It is the sum of ``reach``: the root counts for the recovered or bonus token.
    """
    return reach(shape, rank_acceptance).sum(-1)


def best_tree(
    rank_acceptance: Acceptance, total: int, max_depth: int, device: torch.device | str = "cpu"
) -> tuple[TreeShape, float]:
    """The shape with the largest expected tau, of at most ``total`` nodes and ``max_depth`` levels.

    Returns that tau, too. ``rank_acceptance`` is [K] or [D, K]. Nodes that could never be accepted
    are left out.
    """
    values, splits = _solve(rank_acceptance, total, max_depth)
    return TreeShape.from_parents(_build(splits, total), device), float(values[total])


def _solve(rank_acceptance: Acceptance, total: int, max_depth: int) -> tuple[Array, Splits]:
    """Best value of a tree by budget [total + 1], and how a budget is split among the children."""
    if total < 1 or max_depth < 0:
        raise ValueError(
            f"total must be at least 1 and max_depth at least 0, got {total} and {max_depth}"
        )
    table: Array = rank_table(rank_acceptance, max_depth).numpy()
    single = np.concatenate([[-np.inf], np.ones(total)])  # no node, or one without children
    values = single
    splits: Splits = []
    for row in table[::-1]:
        forest, choice = _split(row, values)
        values = single.copy()
        values[1:] += forest[:-1]
        splits.insert(0, choice)
    return values, splits


def _split(row: Array, subtree: Array) -> tuple[Array, list[NDArray[np.int64]]]:
    """Best value of one node's children by budget left, and the first child's share by rank.

    forest_r(n) = max over m of a[r] * subtree(m) + forest_{r+1}(n - m), or 0 if the ranks from r on
    stay empty.
    """
    size = len(subtree)
    left = np.arange(size)[:, None] - np.arange(size)  # [n, m]: budget after a child of m nodes
    forest: Array = np.zeros(size)
    choice: list[NDArray[np.int64]] = []
    for accept in row[::-1]:
        value = np.full((size, size), -np.inf)
        value[:, 0] = 0.0
        if accept > 0:
            value[:, 1:] = np.where(
                left[:, 1:] >= 0, accept * subtree[1:] + forest[left[:, 1:]], -np.inf
            )
        choice.insert(0, value.argmax(1))  # the smallest share among equals
        forest = value.max(1)
    return forest, choice


def _build(splits: Splits, total: int) -> list[int]:
    """Parents, level by level, of the tree that the splits describe."""
    parents = [-1]
    level = [(0, total - 1)]  # nodes, and the remaining budget for their descendants
    for ranks in splits:
        below: list[tuple[int, int]] = []
        for node, budget in level:
            remaining = budget
            for share in ranks:
                size = int(share[remaining])
                if size == 0:
                    break
                below.append((len(parents), size - 1))
                parents.append(node)
                remaining -= size
        level = below
    return parents
