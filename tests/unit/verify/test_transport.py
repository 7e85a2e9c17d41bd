"""The optimal transport bound equals brute force over all sets, and no exact rule beats it."""

from __future__ import annotations

import pytest
import torch

from specmm.core.tree import TreeShape
from specmm.verify import GreedyMultiDraft, KSeq, Recursive, expected_tokens, naive, ot_bound
from specmm.verify.exhaustive import draws, node_probs


def probs(seed: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(2, vocab, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_bound_is_brute_force(seed, drafts):
    p, q = probs(seed, 6)
    q = q * (q > 0.05)
    q = q / q.sum()
    assert float(ot_bound(p, q, drafts)) == pytest.approx(
        naive.ot_bound(p.tolist(), q.tolist(), drafts), abs=1e-12
    )


def test_one_draft_reaches_the_overlap():
    p, q = probs(0, 50)
    assert float(ot_bound(p, q, 1)) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
    assert float(ot_bound(p, p, 1)) == pytest.approx(1)
    with pytest.raises(ValueError, match="drafts must be at least 1, got 0"):
        ot_bound(p, q, 0)


@pytest.mark.parametrize("drafts", [2, 3])
def test_rules_by_distance_to_the_bound(drafts, tables):
    shape = TreeShape.from_parents([-1] + [0] * drafts)
    target = tables(1, 4, 2)
    drafter = tables(2, 4, 2)
    kept = {}
    for rule in (Recursive(), KSeq(steps=0), KSeq(steps=2), KSeq(), KSeq(steps=60)):
        drawn = draws(shape, drafter, "independent")
        tokens = expected_tokens(shape, rule.decisions(drawn.tree, node_probs(drawn, target)))
        kept[rule] = float(tokens @ drawn.chance) - 1
    bound = float(ot_bound(target[0][0], drafter[0][0], drafts))
    loose, two, ten, sixty = list(kept.values())[1:]
    assert all(value <= bound + 1e-12 for value in kept.values())
    assert loose <= two + 1e-12 and two <= ten + 1e-12 and ten == pytest.approx(sixty, abs=1e-6)
    assert sixty > float(torch.minimum(target[0], drafter[0]).sum())


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
