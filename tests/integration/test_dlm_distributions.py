"""What each way of drafting emits, exactly, against the published distributions; the biased ways
exist only here, as twins.

Shape letters: R rows, one per draw; N nodes, V vocabulary.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch

from specmm.core.tree import DraftTree, TreeShape
from specmm.diffusion_drafters.block_drafters import marginal_chain, with_root
from specmm.diffusion_drafters.diffusion_chains import point_chain
from specmm.verify import PointMass, Recursive
from specmm.verify.exhaustive import (
    Draws,
    emitted_probs,
    node_probs,
    sequence_probs,
    total_variation,
)
from specmm.verify.rule import Decisions
from tests.sampling import expected_tokens

CASES = json.loads(
    (Path(__file__).parents[1] / "parity" / "dlm" / "verify_law_cases.json").read_text()
)["cases"]
CHAIN = TreeShape.chain(2)


@pytest.fixture(params=CASES, ids=lambda case: case["id"])
def case(request):
    return request.param


def exact(numbers):
    probs = torch.tensor(numbers, dtype=torch.float64)
    return probs / probs.sum(-1, keepdim=True)


def target_of(case):
    """The distribution of the next token after every prefix; what follows two tokens does not
    matter.
    """
    first, second = exact(case["p1"])[None], exact(case["p2"])
    return [first, second, second.repeat(case["V"], 1)]


def enumerated(tokens, chance, probs, vocabulary):
    """Draws of two drafts ``tokens`` [R, 2] of probability ``chance`` [R] that carry ``probs`` [R,
    2, V] or none.
    """
    drafts = torch.tensor(tokens)
    tree = DraftTree(torch.cat([torch.zeros_like(drafts[:, :1]), drafts], 1), CHAIN, probs)
    prefix = torch.stack(
        [torch.zeros_like(drafts[:, 0]), drafts[:, 0], drafts[:, 0] * vocabulary + drafts[:, 1]], 1
    )
    return Draws(tree, chance, prefix)


def independent(drawn_from, recorded):
    """Every pair of tokens drawn from the two rows ``drawn_from`` [2, V], and the rows ``recorded``
    with it.
    """
    size = drawn_from.shape[-1]
    tokens = list(itertools.product(range(size), repeat=2))
    chance = (drawn_from[0][:, None] * drawn_from[1]).flatten()
    probs = None if recorded is None else with_root(recorded.expand(len(tokens), -1, -1))
    return enumerated(tokens, chance, probs, size)


def one(path, recorded, size):
    probs = None if recorded is None else with_root(recorded[None])
    return enumerated([path], torch.ones(1, dtype=torch.float64), probs, size)


def best_of_two(q, recorded):
    """The better of two independent draws by the drafter's own score."""
    drawn = independent(q, recorded)
    score = (q[0][:, None] * q[1]).flatten()
    first, second = torch.meshgrid(
        torch.arange(len(score)), torch.arange(len(score)), indexing="ij"
    )
    winner = torch.where(score[second] > score[first], second, first)
    chance = torch.zeros_like(score).index_add(
        0, winner.flatten(), (score[first] * score[second]).flatten()
    )
    return Draws(drawn.tree, chance, drawn.prefix)


class ScalarResidual:
    """A broken rule: the ratio of marginals, and on rejection a point mass's residual."""

    name, exact = "broken", False

    def decisions(self, tree, p, *, measure=False):
        ratio, point = Recursive().decisions(tree, p), PointMass().decisions(tree, p)
        return Decisions(ratio.accept, point.next_probs)


def ways(case):
    q, q_top2, path, size = exact(case["q"]), exact(case["q_top2"]), case["path"], case["V"]
    return {
        "product_of_marginals": (Recursive(), independent(q, q)),
        "point_mass": (Recursive(), one(path, None, size)),
        "path_with_marginal_ratio": (Recursive(), one(path, q, size)),
        "path_with_ratio_scalar_residual": (ScalarResidual(), one(path, q, size)),
        "sampled_draft_point_mass_rule": (PointMass(), independent(q, q)),
        "truncated_sampling_full_q": (Recursive(), independent(q_top2, q)),
        "truncated_sampling_truncated_q": (Recursive(), independent(q_top2, q_top2)),
        "best_of_two_marginal_ratio": (Recursive(), best_of_two(q, q)),
        "best_of_two_point_mass_rule": (PointMass(), best_of_two(q, q)),
    }


def first_two(rule, drawn, target):
    size = target[0].shape[-1]
    return emitted_probs(rule, drawn, target).view(size * size, size).sum(1)


def accepted(rule, drawn, target):
    decisions = rule.decisions(drawn.tree, node_probs(drawn, target))
    return float((expected_tokens(drawn.tree.shape, decisions) - 1) @ drawn.chance)


def test_every_way_emits_the_published_distribution(case):
    target = target_of(case)
    wanted_probs = sequence_probs(target, 2)
    found = ways(case)
    assert found.keys() == case["options"].keys()
    for name, wanted in case["options"].items():
        probs = first_two(*found[name], target)
        torch.testing.assert_close(
            probs, torch.tensor(wanted["law"], dtype=torch.float64).flatten(), rtol=0, atol=2e-8
        )
        assert total_variation(probs, wanted_probs) == pytest.approx(
            wanted["tv_to_target"], abs=2e-8
        )
        assert accepted(*found[name], target) == pytest.approx(
            wanted["expected_accepted"], abs=2e-8
        )
        assert (total_variation(probs, wanted_probs) < 1e-12) == (wanted["tv_to_target"] == 0)


class UniformSource:
    """Uniforms of many rows from one generator."""

    def __init__(self, rows):
        self.rows, self.generator = rows, torch.Generator().manual_seed(0)

    def draw(self, count):
        return torch.rand(self.rows, count, generator=self.generator)


def test_draws_follow_the_distributions_they_carry():
    case, rows = CASES[4], 4000
    root, uniforms = torch.zeros(rows, dtype=torch.int64), UniformSource(rows)
    free = marginal_chain(root, exact(case["q"]).float().expand(rows, -1, -1), uniforms)
    share = torch.stack(
        [(free.tokens[:, 1:] == token).float().mean(0) for token in range(case["V"])], 1
    )
    torch.testing.assert_close(share, exact(case["q"]).float(), rtol=0, atol=0.03)


def test_chosen_paths_carry_no_distributions():
    tree = point_chain(torch.tensor([7, 8]), [(1, 2, 3), ()], 2)
    assert tree.tokens.tolist() == [[7, 1, 2], [8, 8, 8]] and tree.probs is None
    assert point_chain(torch.tensor([7]), [()], 0).tokens.tolist() == [[7]]
