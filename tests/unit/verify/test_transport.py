"""The optimal transport bound equals brute force over all sets, and no exact rule beats it."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from benchmarks.single import ot_bound
from specmm.core.tree import TreeShape
from specmm.verify import GreedyMultiDraft, Recursive
from specmm.verify.exhaustive import draws, node_probs
from tests.sampling import expected_tokens


def probs(seed: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(2, vocab, generator=generator, dtype=torch.float64)).softmax(-1)


def over_all_sets(p, q, drafts):
    """1 + min over every set H of p(H) - q(H)^k."""
    tokens = range(len(p))
    sets = (chosen for count in range(len(p) + 1) for chosen in combinations(tokens, count))
    return 1 + min(math.fsum(p[x] for x in h) - math.fsum(q[x] for x in h) ** drafts for h in sets)


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_bound_is_brute_force(seed, drafts):
    p, q = probs(seed, 6)
    q = q * (q > 0.05)
    q = q / q.sum()
    assert float(ot_bound(p, q, drafts)) == pytest.approx(
        over_all_sets(p.tolist(), q.tolist(), drafts), abs=1e-12
    )


def test_one_draft_reaches_the_overlap():
    p, q = probs(0, 50)
    assert float(ot_bound(p, q, 1)) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
    assert float(ot_bound(p, p, 1)) == pytest.approx(1)


@pytest.mark.parametrize("drafts", [2, 3])
def test_independent_siblings_stay_below_the_bound(drafts, tables):
    shape = TreeShape.from_parents([-1] + [0] * drafts)
    target, drafter = tables(1, 4, 2), tables(2, 4, 2)
    drawn = draws(shape, drafter, "independent")
    tokens = expected_tokens(shape, Recursive().decisions(drawn.tree, node_probs(drawn, target)))
    kept = float(tokens @ drawn.chance) - 1
    overlap = float(torch.minimum(target[0], drafter[0]).sum())
    assert overlap < kept <= float(ot_bound(target[0][0], drafter[0][0], drafts)) + 1e-12


def test_greedy_multi_draft_reaches_its_optimum(tables):
    shape, target, drafter = TreeShape.from_parents([-1, 0, 0]), tables(1, 4, 2), tables(2, 4, 2)
    p, q = target[0][0], drafter[0][0]
    drawn = draws(shape, drafter, "top and sample")
    tokens = expected_tokens(
        shape, GreedyMultiDraft().decisions(drawn.tree, node_probs(drawn, target))
    )
    rest = q.clone()
    rest[q.argmax()] = 0
    optimum = p[q.argmax()] + torch.minimum(p, rest / rest.sum()).sum()
    assert float(tokens @ drawn.chance) - 1 == pytest.approx(float(optimum), abs=1e-12)
