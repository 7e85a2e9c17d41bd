"""Matching gives the tokens of plain decoding for every uniform, whatever is drafted, and so the
target's distribution; a twin that uses one uniform twice does not.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from specmm.core.randomness import PredrawnUniforms, categorical
from specmm.core.tree import DraftTree, TreeShape
from specmm.verify.exhaustive import total_variation
from specmm.verify.matching import Matching

CHAIN, BUSHY, UNEVEN = [-1, 0, 1], [-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 0, 4]
V = 3


class Twin(Matching):
    """Every token by the uniform of the first."""

    def result(self, tree, p, uniforms):
        first = uniforms.draw(tree.shape.depth + 1)[:, :1]
        return super().result(tree, p, PredrawnUniforms(first.repeat(1, tree.shape.depth + 1)))


def drawn(parents, seed):
    """A tree of different siblings, and the target's distributions after its nodes, which depend on
    the tokens of their path.
    """
    numbers = torch.Generator().manual_seed(seed)
    shape = TreeShape.from_parents(parents)
    tokens = torch.zeros(1, shape.size, dtype=torch.int64)
    orders = torch.rand(shape.size, V, generator=numbers).argsort(-1)
    for node, parent in enumerate(parents[1:], 1):
        tokens[0, node] = orders[parent, shape.ranks[0, node]]
    table = {
        path: torch.rand(V, generator=numbers, dtype=torch.float64)
        for depth in range(shape.depth + 1)
        for path in product(range(V), repeat=depth)
    }
    table = {path: row / row.sum() for path, row in table.items()}

    def path(node):
        return () if node == 0 else (*path(parents[node]), int(tokens[0, node]))

    p = torch.stack([table[path(node)] for node in range(shape.size)])[None]
    return DraftTree(tokens, shape), p, table


def plain(table, numbers):
    """The tokens that plain decoding draws."""
    said = ()
    for number in numbers:
        said = (*said, int(categorical(table[said][None], number[None])))
    return said


def emitted(rule, tree, p, numbers):
    """The tokens of a round, the next one included."""
    result = rule.result(tree, p, PredrawnUniforms(numbers[None]))
    kept = tree.tokens[0, result.path[0, 1 : int(result.kept)]].tolist()
    return (*kept, int(result.next_token))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parents", [CHAIN, BUSHY, UNEVEN])
def test_tokens_are_those_of_plain_decoding(parents, seed):
    tree, p, table = drawn(parents, seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = set()
    for _ in range(200):
        numbers = torch.rand(tree.shape.depth + 1, dtype=torch.float64, generator=generator)
        found = emitted(Matching(), tree, p, numbers)
        assert found == plain(table, numbers)[: len(found)]
        lengths.add(len(found))
    assert len(lengths) > 1


def cells(p):
    """Intervals of a uniform in which nothing changes: a number within, and how wide they are."""
    ends = torch.cat([torch.zeros(1, dtype=torch.float64), p.cumsum(-1).flatten()]).unique()
    ends = torch.cat([ends[ends < 1], torch.ones(1, dtype=torch.float64)])
    return list(zip((ends[:-1] + ends[1:]) / 2, ends.diff(), strict=True))


def law(rule, tree, p, table):
    """Probabilities of two tokens [V * V]: of a round, then of plain decoding if it gave one."""
    found = torch.zeros(V, V, dtype=torch.float64)
    depth = tree.shape.depth + 1
    for chosen in product(cells(p), repeat=depth):
        numbers = torch.stack([number for number, _ in chosen])
        chance = torch.stack([width for _, width in chosen]).prod()
        said = emitted(rule, tree, p, numbers)
        if len(said) == 1:
            found[said[0]] += chance * table[said]
        else:
            found[said[0], said[1]] += chance
    return found.flatten()


@pytest.mark.parametrize("parents", [CHAIN[:2], BUSHY[:3], [-1, 0, 0, 0]])
def test_its_law_is_the_targets(parents):
    tree, p, table = drawn(parents, 3)
    wanted = torch.stack([table[()][i] * table[(i,)] for i in range(V)]).flatten()
    assert total_variation(law(Matching(), tree, p, table), wanted) < 1e-12
    assert total_variation(law(Twin(), tree, p, table), wanted) > 0.01


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("parents", [CHAIN, UNEVEN])
def test_nothing_after_the_drafts_of_a_row_is_kept(parents, size):
    tree, p, table = drawn(parents, 0)
    p[:, tree.shape.depths[0] >= size] = float("nan")  # which no target has scored
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(200):
        numbers = torch.rand(tree.shape.depth + 1, dtype=torch.float64, generator=generator)
        found = emitted(Matching(), replace(tree, sizes=torch.tensor([size])), p, numbers)
        assert found == plain(table, numbers)[: len(found)]
        lengths.add(len(found))
    assert max(lengths) == size
