from functools import cache

import pytest
import torch

from specmm.core.tree import TreeShape
from specmm.shape.sequoia import best_tree, expected_tau


@cache
def trees(nodes, depth):
    """All ordered trees of exactly ``nodes`` nodes and at most ``depth`` levels, as nested tuples
    of children.
    """
    return () if nodes < 1 else forests(nodes - 1, depth) if depth else ((),) if nodes == 1 else ()


@cache
def forests(nodes, depth):
    if nodes == 0:
        return ((),)
    return tuple(
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in trees(size, depth - 1)
        for rest in forests(nodes - size, depth)
    )


def shape_of(tree):
    parents, queue = [-1], [(0, tree)]
    for node, children in queue:
        for child in children:
            queue.append((len(parents), child))
            parents.append(node)
    return TreeShape.from_parents(parents)


def brute(accept, total, depth):
    shapes = [shape_of(t) for n in range(1, total + 1) for t in trees(n, depth)]
    return max(expected_tau(s, accept).item() for s in shapes)


def tables():
    generator = torch.Generator().manual_seed(0)
    flat = torch.rand(3, generator=generator)
    by_depth = torch.rand(3, 4, generator=generator)
    peaked = torch.tensor([0.9, 0.06, 0.01])
    rising = torch.tensor([0.1, 0.6, 0.2])  # a later rank may be the better one
    return [flat / flat.sum() * 0.9, by_depth / by_depth.sum(1, keepdim=True) * 0.8, peaked, rising]


def test_the_reference_enumerates_every_tree():
    assert [len(trees(n, 9)) for n in range(1, 7)] == [1, 1, 2, 5, 14, 42]  # Catalan numbers


@pytest.mark.parametrize("accept", tables())
@pytest.mark.parametrize(("total", "depth"), [(1, 2), (2, 1), (5, 2), (6, 3), (7, 2)])
def test_equals_brute_force(accept, total, depth):
    shape, tau = best_tree(accept, total, depth)
    assert shape.size <= total
    assert shape.depth <= depth
    assert tau == pytest.approx(expected_tau(shape, accept).item())
    assert tau == pytest.approx(brute(accept, total, depth))


def test_uses_the_whole_budget_when_every_node_helps():
    shape, _ = best_tree([0.6, 0.2, 0.1], 40, 6)
    assert shape.size == 40


def test_leaves_out_nodes_that_are_never_kept():
    shape, tau = best_tree([0.5, 0.0], 10, 2)
    assert shape.parents.tolist() == [[-1, 0, 1]]
    assert tau == 1.75


def test_errors():
    with pytest.raises(ValueError, match="total must be at least 1"):
        best_tree([0.5], 0, 2)
