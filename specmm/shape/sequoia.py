"""Sequoia's dynamic programme: the tree of N nodes that is kept longest (arXiv 2402.12374).

Under positional acceptance (``specmm.shape.expected``) a tree is worth the sum over its nodes of
the product of a[rank] along the path. The best tree under a node splits its budget among the
children, rank by rank. Runs once, on the host.

Shape letters: D deepest level, K ranks, N nodes (the root included).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specmm.shape.expected import Acceptance, rank_table
from specmm.tree import TreeShape

Array = NDArray[np.float64]
Splits = list[list[NDArray[np.int64]]]  # [depth][rank][budget left] -> nodes given to that child


def best_tree(
    rank_acceptance: Acceptance, total: int, max_depth: int, device: torch.device | str = "cpu"
) -> tuple[TreeShape, float]:
    """The shape of at most ``total`` nodes and ``max_depth`` levels with the largest expected tau,
    and that tau.

    ``rank_acceptance`` is [K] or [D, K]. Nodes that could never be kept are left out.
    """
    values, splits = _solve(rank_acceptance, total, max_depth)
    return TreeShape.from_parents(_build(splits, total), device), float(values[total])


def fastest_tree(
    rank_acceptance: Acceptance,
    seconds: Callable[[int, int], float],
    sizes: Sequence[int],
    max_depth: int,
    device: torch.device | str = "cpu",
) -> tuple[TreeShape, float]:
    """The shape with the most expected tokens per second, and that rate, over ``sizes`` and depths
    up to ``max_depth``.

    ``seconds(nodes, depth)`` is the measured cost of a round: drafting ``depth`` levels, verifying
    ``nodes`` nodes and the host's share (``specmm.autotune.Costs.round``). Sequoia's hardware-aware
    search.
    """
    if not sizes or max_depth < 1:
        raise ValueError(
            f"sizes must not be empty and max_depth at least 1, got {list(sizes)} and {max_depth}"
        )
    solved = [_solve(rank_acceptance, max(sizes), depth) for depth in range(1, max_depth + 1)]
    rate, total, depth = max(
        (float(values[total]) / seconds(total, depth), total, depth)
        for depth, (values, _) in enumerate(solved, start=1)
        for total in sizes
    )
    return TreeShape.from_parents(_build(solved[depth - 1][1], total), device), rate


def _solve(rank_acceptance: Acceptance, total: int, max_depth: int) -> tuple[Array, Splits]:
    """Best value of a tree [total + 1] by budget, and how each budget is split among the children."""
    if total < 1 or max_depth < 0:
        raise ValueError(
            f"total must be at least 1 and max_depth at least 0, got {total} and {max_depth}"
        )
    table: Array = rank_table(rank_acceptance, max_depth).numpy()
    alone = np.concatenate([[-np.inf], np.ones(total)])  # no node, or one without children
    values = alone
    splits: Splits = []
    for row in table[::-1]:
        forest, choice = _split(row, values)
        values = alone.copy()
        values[1:] += forest[:-1]
        splits.insert(0, choice)
    return values, splits


def _split(row: Array, subtree: Array) -> tuple[Array, list[NDArray[np.int64]]]:
    """Best value of the children of one node by budget left, and the first child's share for each
    rank.

    forest_r(n) = max over m of a[r] * subtree(m) + forest_{r+1}(n - m), or 0 when the ranks from r
    on stay empty.
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
    parents, level = [-1], [(0, total - 1)]
    for ranks in splits:
        below: list[tuple[int, int]] = []
        for node, budget in level:
            left = budget
            for share in ranks:
                given = int(share[left])
                if given == 0:
                    break
                below.append((len(parents), given - 1))
                parents.append(node)
                left -= given
        level = below
    return parents
