"""Rules and trees by name: what they are made of, and mistakes."""

import pytest
import torch

from specmm.core.decode import decide
from specmm.core.randomness import Uniforms
from specmm.core.tree import DraftTree, TreeShape
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import TREES, draw_siblings, likeliest_and_one, make_tree, static_tree
from specmm.verify.rule import RULES, make_rule, rule_kind
from tests.sampling import p_value

TARGET = torch.tensor([0.1, 0.35, 0.05, 0.3, 0.2], dtype=torch.float64)
DRAFT = torch.tensor([0.3, 0.1, 0.25, 0.3, 0.05], dtype=torch.float64)
ROWS = 20_000
EXACT = [name for name in RULES if rule_kind(name).rule.exact and name != "block"]


def test_every_tree_is_spelt_as_it_says():
    for name, kind in TREES.items():
        found = make_tree(kind.spelling)
        assert isinstance(found, Dynamic if name == "dynamic" else TreeShape)


def test_trees_by_their_numbers():
    assert make_tree("delayed(1, 2, 1)").parents.tolist() == [[-1, 0, 1, 1]]
    assert make_tree("branching(2, 1)").parents.tolist() == [[-1, 0, 0, 1, 2]]
    assert make_tree((2, 1)).parents.tolist() == make_tree("spine(2, 1)").parents.tolist()
    assert make_tree((-1, 0, 0)).parents.tolist() == [[-1, 0, 0]]
    assert make_tree("sequoia(4)", acceptance=[[0.6, 0.2], [0.5, 0.1]]).size == 4
    assert make_tree("mc_sim_7b_63").size == 26


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("oak(2)", "unknown tree 'oak'"),
        ("delayed(1)", "a tree must read as delayed"),
        ("sequoia(4)", "acceptance was measured, got none"),
        ("dynamic(total=5)", "fixed shape to be drawn"),
        ("chain(2", "must read NAME"),
    ],
)
def test_trees_that_are_none(tree, said):
    with pytest.raises(ValueError, match=said):
        static_tree(tree)


def test_rules_by_their_options():
    assert make_rule("typical(epsilon=0.2)").epsilon == 0.2
    with pytest.raises(ValueError, match="option of rule typical 'eps'; did you mean 'epsilon'"):
        make_rule("typical(eps=1)")
    with pytest.raises(ValueError, match="unknown rule 'recursve'; did you mean 'recursive'"):
        rule_kind("recursve")


def first_tokens(rule, siblings, seed=0, recorded=None):
    """The first token after the root [ROWS] by ``rule``, of three siblings drawn as it wants."""
    uniforms = Uniforms([torch.Generator().manual_seed(seed)])
    shape = TreeShape.from_parents([-1, 0, 0, 0])
    numbers = [torch.rand(ROWS, n, generator=uniforms.generators[0]) for n in (5, 8)]
    dist = DRAFT.expand(ROWS, 1, -1)
    if siblings is None:
        tokens, probs = dist.topk(3).indices[:, 0], None
    else:
        drawn, probs = draw_siblings(dist, 3, Given(numbers[0]), siblings)
        tokens = drawn[:, 0]
        probs = torch.cat(
            [torch.zeros(ROWS, 1, 5), probs[:, 0] if recorded is None else recorded], 1
        )
    tree = DraftTree(torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), tokens], 1), shape, probs)
    p = TARGET.expand(ROWS, 4, -1)
    result = decide(rule, tree, p, Given(numbers[1]))
    second = result.path[:, 1].clamp(min=0)
    kept = tree.tokens.gather(1, second[:, None])[:, 0]
    return torch.where(result.kept > 1, kept, result.next_token)


class Given:
    """Uniforms [ROWS, …] that were drawn before, handed out in order."""

    def __init__(self, numbers):
        self.numbers, self.used = numbers, 0

    def draw(self, count):
        missing = self.used + count - self.numbers.shape[1]
        if missing > 0:
            more = torch.rand(ROWS, missing, generator=torch.Generator().manual_seed(count))
            self.numbers = torch.cat([self.numbers, more], 1)
        self.used += count
        return self.numbers[:, self.used - count : self.used]


@pytest.mark.parametrize("name", EXACT)
def test_siblings_are_drawn_as_an_exact_rule_wants_them(name):
    assert p_value(TARGET, first_tokens(make_rule(name), rule_kind(name).siblings)) > 1e-4


@pytest.mark.parametrize(
    ("name", "siblings"), [("recursive", "likeliest and one"), ("specinfer", "likeliest and one")]
)
def test_siblings_drawn_for_another_rule_are_caught(name, siblings):
    assert p_value(TARGET, first_tokens(make_rule(name), siblings)) < 1e-4


def test_the_likeliest_and_one():
    dist = torch.tensor([[[0.5, 0.3, 0.2, 0.0]]], dtype=torch.float64)
    tokens, probs = likeliest_and_one(dist, 3, torch.tensor([[0.4]], dtype=torch.float64))
    assert tokens.tolist() == [[[2, 0, 1]]] and probs[0, 0, 0].tolist() == [0, 0, 1, 0]
    spent, _ = likeliest_and_one(dist[..., :3], 3, torch.tensor([[0.4]], dtype=torch.float64))
    assert spent.tolist() == [[[2, 0, 1]]]
    certain = torch.tensor([[[1.0, 0, 0, 0]]], dtype=torch.float64)
    _, uniform = likeliest_and_one(certain, 2, torch.tensor([[0.4]], dtype=torch.float64))
    assert uniform[0, 0, 0].tolist() == [0, 1 / 3, 1 / 3, 1 / 3]
