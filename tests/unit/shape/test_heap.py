import heapq
import itertools

import pytest
import torch

from specmm.core.tree import DraftTree, TreeShape
from specmm.shape.blocks import block_tree
from specmm.shape.eagle2 import finish, start, step


def paths(tree, row=0):
    """The tree as the set of its token paths."""
    parents, tokens = tree.shape.parents[row].tolist(), tree.tokens[row].tolist()
    found = [()]
    for node in range(1, len(parents)):
        found.append((*found[parents[node]], tokens[node]))
    assert len(set(found)) == len(found)
    return set(found[1:])


def brute(probs, vocab, depth, count):
    scored = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(vocab), repeat=length):
            product = 1.0
            for i, token in enumerate(path):
                product *= float(probs(path[:i])[token])
            scored[path] = product
    return set(sorted(scored, key=scored.__getitem__, reverse=True)[:count])


def markov(vocab, seed):
    table = torch.randn(
        vocab, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (table * 1.5).softmax(-1)


def block_tree_heap(marginals: torch.Tensor, root: int, total: int) -> DraftTree:
    """``block_tree`` for one row, ``marginals`` [D, V], as DDTree states it: the reference.

    A heap over paths of ranks. A path is followed by its next sibling and its first child, so each
    path is pushed once and after a better one.
    """
    best = marginals.sort(dim=-1, descending=True, stable=True)
    probs = best.values.tolist()
    ids = best.indices.tolist()
    tokens = [root]
    parents = [-1]
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-probs[0][0], (0,), 0, 1.0)]
    while heap and len(tokens) < total:
        product, path, parent, above = heapq.heappop(heap)
        depth = len(path)
        rank = path[-1]
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        if rank + 1 < len(probs[0]):
            sibling = (*path[:-1], rank + 1)
            heapq.heappush(heap, (-above * probs[depth - 1][rank + 1], sibling, parent, above))
        if depth < len(probs):
            heapq.heappush(heap, (product * probs[depth][0], (*path, 0), len(tokens) - 1, -product))
    return DraftTree(torch.tensor([tokens]), TreeShape.from_parents(parents))


@pytest.mark.parametrize("seed", range(4))
def test_level_by_level_finds_the_most_probable_paths_when_the_beam_is_wide(seed):
    table = markov(5, seed)
    wanted = brute(lambda path: table[path[-1] if path else 2], 5, 3, 5)
    beam = start(table.log()[[2]], 5)
    for _ in range(2):
        beam = step(beam, table.log()[beam.tokens])
    assert paths(finish(beam, torch.tensor([2]), 6)) == wanted


@pytest.mark.parametrize(
    ("depth", "vocab", "total"), [(1, 9, 5), (4, 6, 2), (4, 6, 40), (3, 50, 64), (6, 3, 30)]
)
def test_block_tree_equals_the_heap(depth, vocab, total):
    generator = torch.Generator().manual_seed(depth * 100 + total)
    marginals = (
        torch.randn(3, depth, vocab, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    )
    tree = block_tree(marginals, torch.arange(3), total)
    for row in range(3):
        assert paths(tree, row) == paths(block_tree_heap(marginals[row], row, total))
    assert int(tree.shape.depths.max()) <= tree.shape.depth
    assert int(tree.shape.ranks.max()) < tree.shape.width


def test_block_heap_finds_the_most_probable_paths():
    marginals = torch.randn(
        3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).softmax(-1)
    tree = block_tree_heap(marginals, 0, 20)
    assert paths(tree) == brute(lambda path: marginals[len(path)], 4, 3, 19)


def test_block_tree_with_certain_tokens_is_a_chain_first():
    marginals = torch.eye(4)[None, :3]  # probability 1 on tokens 0, 1, 2
    tree = block_tree(marginals, torch.tensor([9]), 4)
    assert tree.tokens.tolist() == [[9, 0, 1, 2]]
    assert tree.shape.parents.tolist() == [[-1, 0, 1, 2]]


def test_errors():
    with pytest.raises(ValueError, match="marginals must be"):
        block_tree(torch.ones(2, 3), torch.tensor([0, 1]), 4)
    with pytest.raises(ValueError, match="total must be"):
        block_tree(torch.ones(1, 2, 2) / 2, torch.tensor([0]), 99)
