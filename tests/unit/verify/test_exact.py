"""Exact rules keep the target's distribution to 1e-12, by enumerating every draw; their broken
twins do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from specmm.core.processors import Processor
from specmm.core.tree import DraftTree, TreeShape
from specmm.verify import (
    Block,
    Decisions,
    GreedyMatch,
    GreedyMultiDraft,
    PointMass,
    Recursive,
    Traversal,
    bottom_up,
)
from specmm.verify.exhaustive import (
    draws,
    emitted_probs,
    node_probs,
    sequence_probs,
    total_variation,
)
from tests.sampling import expected_tokens

CHAIN, FORK, TWO, BUSHY = [-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 1, 1, 2], [-1, 0, 0, 0, 1, 1, 2]
UNEVEN = [-1, 0, 1, 1, 0, 4, 3]
WITHOUT, EVERY = "without replacement", (CHAIN, FORK, TWO, BUSHY, UNEVEN)
CASES = [
    *product([Recursive()], ("independent", WITHOUT), (CHAIN, TWO, BUSHY)),
    (Recursive(), "top and sample", BUSHY),
    (Recursive(), WITHOUT, UNEVEN),
    *product((Recursive(), PointMass(), Traversal()), ["top"], (CHAIN, BUSHY, UNEVEN)),
    *product([PointMass()], ("independent", WITHOUT), [TWO]),
    *product([GreedyMultiDraft()], ["top and sample"], EVERY[:-1]),
    *product([Block()], ("independent", "top"), [CHAIN]),
    *product([Traversal()], [WITHOUT], EVERY),
]
PROCESSORS = {
    "plain": (Processor(), 1.0),
    "cold": (Processor(temperature=0.5), 1.0),
    "top-k": (Processor(top_k=2), 1.0),
    "top-p, guided": (Processor(temperature=1.3, top_p=0.8), 3.0),
}


def gap(rule, parents, scheme, tables, process=(None, 1.0), drafter=None, seed=0) -> float:
    shape = TreeShape.from_parents(parents)
    length = shape.depth + 1
    target = tables(seed, 3, length, *process)
    drawn = draws(shape, tables(seed + 100, 3, length, drafter), scheme)
    assert abs(float(drawn.chance.sum()) - 1) < 1e-12
    return total_variation(emitted_probs(rule, drawn, target), sequence_probs(target, length))


@pytest.mark.parametrize("process", PROCESSORS.values(), ids=PROCESSORS.keys())
@pytest.mark.parametrize("rule, scheme, parents", CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_exact_rules_keep_the_targets_distribution(rule, scheme, parents, process, tables):
    assert rule.exact
    assert gap(rule, parents, scheme, tables, process) < 1e-12


@pytest.mark.parametrize("rule", [Recursive(), Traversal()], ids=lambda r: r.name)
def test_a_drafter_without_full_support_stays_exact(rule, tables):
    assert gap(rule, BUSHY, "without replacement", tables, drafter=Processor(top_k=2)) < 1e-12
    assert gap(rule, BUSHY, "without replacement", tables, drafter=Processor(temperature=0)) < 1e-12


@pytest.mark.parametrize("scheme", ["independent", "without replacement", "top"])
@pytest.mark.parametrize("parents", [CHAIN, TWO, BUSHY], ids=str)
def test_greedy_match_is_greedy_decoding(scheme, parents, tables):
    for seed in range(5):
        assert (
            gap(GreedyMatch(), parents, scheme, tables, (Processor(temperature=0), 1.0), seed=seed)
            < 1e-12
        )


def test_a_drafter_equal_to_the_target_is_always_kept(tables):
    shape = TreeShape.from_parents(CHAIN)
    target = tables(5, 3, 4)
    drawn = draws(shape, target, "independent")
    for rule in (Recursive(), Block(), Traversal()):
        deepest = rule.decisions(drawn.tree, node_probs(drawn, target)).accept[:, -1]
        assert torch.allclose(deepest, torch.ones_like(deepest))


@dataclass
class Broken:
    """An exact rule with a mistake in it."""

    decide: Callable[[DraftTree, Tensor], Decisions]
    name: str = "broken"
    exact: bool = True

    def decisions(self, tree: DraftTree, p: Tensor, *, measure: bool = False) -> Decisions:
        return self.decide(tree, p)


def forgets_the_residual(rule):
    """The recovered token is drawn from p."""
    return Broken(lambda tree, p: replace(rule.decisions(tree, p), after=p))


def misreads_second_siblings(rule, q):
    """Takes ``q`` of a tree and a node for the node's, where it is a second sibling."""

    def decide(tree, p):
        probs = tree.probs.clone()
        for node in range(1, tree.shape.size):
            if tree.shape.ranks[0, node] == 1:
                probs[:, node] = q(tree, node)
        return rule.decisions(replace(tree, probs=probs), p)

    return Broken(decide)


def forgets_to_renormalise(rule):
    """Zeroed at the first sibling."""

    def q(tree, node):
        left = 1 - tree.probs[:, node - 1].gather(1, tree.tokens[:, node - 1 : node])
        return tree.probs[:, node] * left

    return misreads_second_siblings(rule, q)


def forgets_earlier_siblings(rule):
    """The first one's, though drawn without replacement."""
    return misreads_second_siblings(rule, lambda tree, node: tree.probs[:, node - 1])


def sample_by_q(rule):
    """Takes q for the distribution of the sample, forgetting that the top tokens were left out."""

    def decide(tree, p):
        probs = tree.probs.clone()
        probs[:, 1:] = 0.7 * probs[:, 1:] + 0.3 / probs.shape[-1]
        return rule.decisions(replace(tree, probs=probs), p)

    return Broken(decide)


TWINS = {
    "recursive, residual": (forgets_the_residual(Recursive()), WITHOUT, TWO),
    "recursive, unnormalised": (forgets_to_renormalise(Recursive()), WITHOUT, TWO),
    "recursive, earlier siblings": (forgets_earlier_siblings(Recursive()), WITHOUT, TWO),
    "point mass, residual": (forgets_the_residual(PointMass()), "top", TWO),
    "greedy multi-draft, p": (forgets_the_residual(GreedyMultiDraft()), "top and sample", TWO),
    "greedy multi-draft, q": (sample_by_q(GreedyMultiDraft()), "top and sample", TWO),
    "block, residual": (forgets_the_residual(Block()), "independent", CHAIN),
    "traversal, residual": (forgets_the_residual(Traversal()), WITHOUT, TWO),
    "traversal, earlier siblings": (forgets_earlier_siblings(Traversal()), WITHOUT, TWO),
}


@pytest.mark.parametrize("rule, scheme, parents", TWINS.values(), ids=TWINS.keys())
def test_the_same_test_rejects_broken_twins(rule, scheme, parents, tables):
    assert gap(rule, parents, scheme, tables) > 1e-3


def test_top_candidates_tested_with_p_over_q_are_biased(tables):
    shape, target, drafter = TreeShape.from_parents(TWO), tables(0, 3, 3), tables(100, 3, 3)
    drawn = draws(shape, drafter, "top")
    paths = drawn.prefix[:, shape.parents[0, 1:]]
    probs = [
        drafter[d][paths[:, n]]
        for n, d in enumerate(shape.depths[0, shape.parents[0, 1:]].tolist())
    ]
    drawn.tree.probs = torch.stack([probs[0], *probs], dim=1)
    assert (
        total_variation(emitted_probs(Recursive(), drawn, target), sequence_probs(target, 3)) > 1e-3
    )


@pytest.mark.parametrize(
    "rule, parents", [(Traversal(), BUSHY), (Traversal(), CHAIN), (Block(), CHAIN)], ids=str
)
def test_a_reach_computed_again_from_the_parent_is_biased(rule, parents, tables, monkeypatch):
    monkeypatch.setattr(bottom_up, "_raised", lambda reach, total: reach)
    assert gap(rule, parents, "without replacement", tables) > 1e-3


def test_block_and_traversal_agree_on_chains_and_beat_single_draft(tables):
    shape, target = TreeShape.from_parents(CHAIN), tables(3, 3, 4)
    drawn = draws(shape, tables(4, 3, 4), "independent")
    probs = node_probs(drawn, target)
    decided = [r.decisions(drawn.tree, probs) for r in (Recursive(), Block(), Traversal())]
    tokens = [float(expected_tokens(shape, one) @ drawn.chance) for one in decided]
    assert tokens[1] == pytest.approx(tokens[2], abs=1e-12)
    assert tokens[1] > tokens[0] + 1e-3


def test_block_refuses_trees_and_greedy_multi_draft_asks_for_distributions():
    tree = DraftTree(torch.zeros(1, 4, dtype=torch.int64), TreeShape.from_parents(FORK))
    p = torch.ones(1, 4, 3) / 3
    with pytest.raises(ValueError, match="chain"):
        Block().decisions(tree, p)
    with pytest.raises(ValueError, match="probs must hold"):
        GreedyMultiDraft().decisions(tree, p)
