"""Tree shapes against plain Python on random trees, shared and per-row."""

from __future__ import annotations

import pytest
import torch

from specmm.core.tree import DraftTree, TreeShape


def random_parents(size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(n, (1,), generator=generator)) for n in range(1, size))]


def path(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors."""
    return [node] + (path(parents, parents[node]) if parents[node] >= 0 else [])


TREES = [random_parents(12, seed) for seed in range(6)]
RAGGED = TreeShape(torch.tensor(TREES), depth=11, width=11)


@pytest.mark.parametrize("row", range(6))
def test_structure_is_that_of_the_parents(row):
    parents = TREES[row]
    for shape, r in ((TreeShape.from_parents(parents), 0), (RAGGED, row)):
        nodes = range(len(parents))
        assert shape.depths[r].tolist() == [len(path(parents, n)) - 1 for n in nodes]
        assert shape.ancestors[r].tolist() == [
            [j in path(parents, n) for j in nodes] for n in nodes
        ]
        earlier_siblings = [
            [j < n and n > 0 and j > 0 and parents[j] == parents[n] for j in nodes] for n in nodes
        ]
        assert shape.earlier_siblings[r].tolist() == earlier_siblings
        assert shape.ranks[r].tolist() == [sum(e) for e in earlier_siblings]


@pytest.mark.parametrize("row", range(6))
def test_children_by_rank(row):
    parents = TREES[row]
    shape = TreeShape.from_parents(parents)
    assert shape.inner.tolist() == sorted(set(parents[1:]))
    assert shape.depth == max(len(path(parents, n)) for n in range(12)) - 1
    assert shape.width == max(parents.count(n) for n in parents[1:])
    for table, inner, r in ((shape.children, shape.inner, 0), (RAGGED.children, RAGGED.inner, row)):
        for family, node in zip(table[r].tolist(), inner.tolist(), strict=True):
            kids = [n for n, parent in enumerate(parents) if parent == node]
            assert family == kids + [-1] * (len(family) - len(kids))


@pytest.mark.parametrize("size", [5, 64, 65, 130])
def test_ancestor_words_hold_the_mask(size):
    shape = TreeShape.from_parents(random_parents(size, 1))
    words = shape.ancestor_words
    assert words.shape == (1, size, -(-size // 64)) and words.dtype == torch.int64
    bits = [[bool(words[0, i, j // 64] >> (j % 64) & 1) for j in range(size)] for i in range(size)]
    assert bits == shape.ancestors[0].tolist()


def test_a_chain_and_a_list_of_choices():
    assert TreeShape.chain(3).parents.tolist() == [[-1, 0, 1, 2]]
    wanted = (3, 1, 4)
    assert (TreeShape.chain(3).depth, TreeShape.chain(3).width, TreeShape.chain(3).size) == wanted
    shape = TreeShape.from_choices([[1], [0], [0, 1], [0, 0], [1, 0], [0, 0, 0]])
    assert shape.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 3]]
    assert shape.ranks.tolist() == [[0, 0, 1, 0, 1, 0, 0]]
    assert shape.shared and not RAGGED.shared


def test_what_is_no_tree_is_refused():
    with pytest.raises(ValueError, match="must start with -1"):
        TreeShape.from_parents([0, 1])
    with pytest.raises(ValueError, match="must start with -1"):
        TreeShape.from_parents([])
    with pytest.raises(ValueError, match=r"parent of node 1 must be in \[0, 1\), got 1"):
        TreeShape.from_parents([-1, 1])
    with pytest.raises(ValueError, match=r"tree choice \[1, 0\] has no parent"):
        TreeShape.from_choices([[0], [1, 0]])


def test_a_tree_checks_its_sizes():
    shape = TreeShape.chain(2)
    with pytest.raises(ValueError, match=r"tokens must be \[B, 3\], got \[1, 4\]"):
        DraftTree(torch.zeros(1, 4, dtype=torch.int64), shape)
    with pytest.raises(ValueError, match=r"probs must be \[B, N, V\]"):
        DraftTree(torch.zeros(1, 3, dtype=torch.int64), shape, torch.ones(1, 2, 5))


def test_a_chain_of_fewer_than_no_drafts_is_refused() -> None:
    assert TreeShape.chain(0).size == 1
    with pytest.raises(ValueError, match="a chain must have at least 0 drafts, got -3"):
        TreeShape.chain(-3)
