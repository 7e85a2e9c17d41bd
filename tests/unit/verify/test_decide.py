"""The uniforms: frequencies follow the decisions (chi-square), rows never mind each other, paths
are well formed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy.stats import chisquare

from specmm.core.decode import decide
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import (
    Block,
    Decisions,
    GreedyMultiDraft,
    PointMass,
    Recursive,
    Traversal,
    VerifyResult,
    endings,
)
from specmm.verify.exhaustive import Draws, draws, emitted_probs, node_probs, sequence_probs
from tests.sampling import expected_tokens

ROWS = 20_000
TREE, CHAIN = [-1, 0, 0, 1, 1, 2], [-1, 0, 1]
CASES = {
    "recursive": (Recursive(), "without replacement", TREE),
    "recursive, chain": (Recursive(), "independent", CHAIN),
    "point mass": (PointMass(), "top", TREE),
    "recursive, independent": (Recursive(), "independent", TREE),
    "greedy multi-draft": (GreedyMultiDraft(), "top and sample", TREE),
    "block": (Block(), "independent", CHAIN),
    "traversal": (Traversal(), "without replacement", TREE),
}


class Forgetful:
    """A broken twin: draws the recovered token from p."""

    name, exact = "forgetful", True

    def __init__(self, rule) -> None:
        self.rule = rule

    def decisions(self, tree: DraftTree, p: torch.Tensor, *, measure: bool = False) -> Decisions:
        return replace(self.rule.decisions(tree, p), after=p)


def sampled(drawn: Draws, seed: int) -> Draws:
    """ROWS draws of the tree, by their probability."""
    pick = torch.multinomial(
        drawn.chance, ROWS, replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    tree = drawn.tree
    probs = None if tree.probs is None else tree.probs[pick]
    return Draws(
        DraftTree(tree.tokens[pick], tree.shape, probs), drawn.chance[pick], drawn.prefix[pick]
    )


def frequencies(result: VerifyResult, drawn: Draws, target, seed: int) -> torch.Tensor:
    """How often each sequence of D + 1 tokens came out, short ones completed by the target."""
    generator, vocab = torch.Generator().manual_seed(seed), target[0].shape[-1]
    row = torch.arange(ROWS)
    last = result.path.amax(1)
    index = drawn.prefix[row, last] * vocab + result.next_token
    for depth in range(1, drawn.tree.shape.depth + 1):
        short = result.kept <= depth
        table = target[depth][index.clamp(max=len(target[depth]) - 1)]
        more = torch.multinomial(table, 1, generator=generator)[:, 0]
        index = torch.where(short, index * vocab + more, index)
    return torch.bincount(index, minlength=vocab ** (drawn.tree.shape.depth + 1))


def p_value(rule, scheme, parents, tables) -> float:
    shape, target = TreeShape.from_parents(parents), tables(11, 3, 3)
    drawn = sampled(draws(shape, tables(12, 3, 3), scheme), seed=1)
    streams = Uniforms([torch.Generator().manual_seed(2)], dtype=torch.float64)
    uniforms = SharedStream(streams.draw(ROWS * (shape.size + 1)).view(ROWS, -1))
    result = decide(rule, drawn.tree, node_probs(drawn, target), uniforms)
    observed = frequencies(result, drawn, target, seed=3)
    return float(
        chisquare(observed.numpy(), (sequence_probs(target, shape.depth + 1) * ROWS).numpy()).pvalue
    )


class SharedStream:
    """Uniforms of many rows from one generator: 20,000 generators would be slow."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def draw(self, count: int) -> torch.Tensor:
        return self.numbers[:, :count]


@pytest.mark.parametrize("rule, scheme, parents", CASES.values(), ids=CASES.keys())
def test_samples_follow_the_target(rule, scheme, parents, tables):
    assert p_value(rule, scheme, parents, tables) > 1e-3


@pytest.mark.parametrize("rule, scheme, parents", CASES.values(), ids=CASES.keys())
def test_the_same_test_rejects_the_broken_twin(rule, scheme, parents, tables):
    assert p_value(Forgetful(rule), scheme, parents, tables) < 1e-6


@pytest.mark.parametrize("rule, scheme, parents", CASES.values(), ids=CASES.keys())
def test_endings_are_the_frequencies_of_the_uniforms(rule, scheme, parents, tables):
    shape, target = TreeShape.from_parents(parents), tables(11, 3, 3)
    drawn = draws(shape, tables(12, 3, 3), scheme)
    tree = DraftTree(
        drawn.tree.tokens[:1], shape, None if drawn.tree.probs is None else drawn.tree.probs[:1]
    )
    p = node_probs(drawn, target)[:1]
    decisions = rule.decisions(tree, p)
    ends = endings(shape, decisions)[0]
    assert float(ends.sum()) == pytest.approx(1)
    probs = None if tree.probs is None else tree.probs.expand(ROWS, -1, -1)
    many = DraftTree(tree.tokens.expand(ROWS, -1), shape, probs)
    numbers = torch.rand(
        ROWS, shape.size + 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    result = decide(rule, many, p.expand(ROWS, -1, -1), SharedStream(numbers))
    observed = torch.bincount(result.path.amax(1), minlength=shape.size) / ROWS
    torch.testing.assert_close(observed.double(), ends, atol=0.015, rtol=0)
    mean = float(result.kept.double().mean())
    assert float(expected_tokens(shape, decisions)) == pytest.approx(mean, abs=0.03)


@pytest.mark.parametrize("per_row", [False, True], ids=["shared shape", "per-row shapes"])
@pytest.mark.parametrize("rule, scheme, parents", CASES.values(), ids=CASES.keys())
def test_a_rows_result_does_not_depend_on_the_others(rule, scheme, parents, per_row, tables):
    shape = TreeShape.from_parents(parents)
    drawn = draws(shape, tables(12, 3, 3), scheme)
    repeat = torch.arange(12) % len(drawn.chance)
    tokens = drawn.tree.tokens[repeat]
    probs = None if drawn.tree.probs is None else drawn.tree.probs[repeat]
    p = node_probs(drawn, tables(11, 3, 3))[repeat]

    def result(rows: list[int]) -> VerifyResult:
        own = shape
        if per_row:
            own = TreeShape(shape.parents.expand(len(rows), -1), shape.depth, shape.width)
        tree = DraftTree(tokens[rows], own, None if probs is None else probs[rows])
        return decide(rule, tree, p[rows], Uniforms.from_seeds(rows))

    together = result(list(range(12)))
    for row in range(12):
        alone = result([row])
        assert torch.equal(alone.path[0], together.path[row])
        assert alone.next_token[0] == together.next_token[row]
        assert alone.kept[0] == together.kept[row]


def test_a_path_is_made_of_parents_and_children(tables):
    shape, target = TreeShape.from_parents(TREE), tables(11, 3, 3)
    drawn = draws(shape, tables(12, 3, 3), "without replacement")
    for rule in (Recursive(), Traversal()):
        uniforms = Uniforms.from_seeds(range(len(drawn.chance)))
        result = decide(rule, drawn.tree, node_probs(drawn, target), uniforms)
        for path, kept in zip(result.path.tolist(), result.kept.tolist(), strict=True):
            assert path[0] == 0 and path[kept:] == [-1] * (len(path) - kept)
            assert all(TREE[child] == parent for parent, child in pairwise(path[:kept]))


def test_probability_zero_is_never_accepted():
    tree = DraftTree(torch.tensor([[0, 1]]), TreeShape.chain(1))
    result = decide(
        PointMass(), tree, torch.tensor([[[1.0, 0.0]] * 2]), SharedStream(torch.zeros(1, 3))
    )
    assert result.kept.tolist() == [1] and result.next_token.tolist() == [0]


def test_the_excess_of_a_result_is_that_of_its_path():
    class Relaxed:
        name, exact = "relaxed", False

        def decisions(self, tree, p, *, measure=False):
            return Decisions(
                torch.tensor([[1.0, 1.0, 0.0, 1.0]]), p, excess=torch.tensor([[0.1, 0.2, 0.4, 0.8]])
            )

    tree = DraftTree(torch.zeros(1, 4, dtype=torch.int64), TreeShape.from_parents([-1, 0, 1, 0]))
    result = decide(
        Relaxed(), tree, torch.full((1, 4, 2), 0.5), Uniforms.from_seeds([0]), measure=True
    )
    assert result.path.tolist() == [[0, 1, -1]]
    assert result.excess.tolist() == [pytest.approx([0.1, 0.2, 0])]


def test_the_sampled_distribution_is_the_enumerated_one(tables):
    shape, target = TreeShape.from_parents(TREE), tables(11, 3, 3)
    drawn = draws(shape, tables(12, 3, 3), "without replacement")
    biased = Forgetful(Recursive())
    many = sampled(drawn, seed=5)
    numbers = torch.rand(
        ROWS, shape.size + 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64
    )
    result = decide(biased, many.tree, node_probs(many, target), SharedStream(numbers))
    observed = frequencies(result, many, target, seed=7)
    expected = emitted_probs(biased, drawn, target) * ROWS
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3
