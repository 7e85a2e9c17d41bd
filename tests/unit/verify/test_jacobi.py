"""Jacobi decoding keeps the target's distribution to 1e-12, by enumerating all that may happen in
all rounds; coupled, it does not under rules that look at later drafts, and its broken twins do not.
"""

from __future__ import annotations

import pytest
import torch

from specmm.core.processors import Processor
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.verify import Block, Grouped, LanternPP, PointMass, Recursive, Traversal
from specmm.verify.exhaustive import sequence_probs, total_variation
from tests.unit.verify.jacobi_rounds import drawing, written

INITS = ("last", "left", "above", "random")


def gap(
    tables, rule, window=2, init="last", coupled=True, make=JacobiDrafter, excess=None, **sizes
):
    """Total variation between what is written and the target's distribution."""
    given = dict(seed=3, vocab=2, length=4) | sizes
    target = tables(**given)
    drafter = make(drawing(given["length"]), window, init, coupled)
    found = written(drafter, rule, target, excess)
    assert abs(float(found.sum()) - 1) < 1e-12
    return total_variation(found, sequence_probs(target, given["length"]))


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("coupled", [False, True])
def test_jacobi_decoding_is_exact_token_by_token(tables, init, window, coupled):
    for seed in (3, 4):
        assert gap(tables, Recursive(), window, init, coupled, seed=seed) < 1e-12


@pytest.mark.parametrize("process", [(Processor(top_k=2), 1.0), (Processor(0.7, top_p=0.8), 2.0)])
@pytest.mark.parametrize("init", INITS)
def test_coupled_drafts_are_exact_where_distributions_are_cut(tables, init, process):
    given = dict(vocab=3, processor=process[0], cfg=process[1])
    assert gap(tables, Recursive(), 2, init, **given) < 1e-12
    assert gap(tables, PointMass(), 2, init, **given) < 1e-12


@pytest.mark.parametrize("rule", [Block(), Traversal()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("window", [2, 3])
def test_coupled_drafts_are_wrong_under_rules_that_look_ahead(tables, rule, window):
    """Why the loop refuses them; drawn afresh they are right."""
    assert gap(tables, rule, window) > 5e-3
    for init in INITS:
        assert gap(tables, rule, window, init, coupled=False) < 1e-12


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("init", ["last", "above"])
def test_what_groups_cost_is_at_most_what_is_measured(tables, init, coupled):
    """GSD's certificate bounds the total variation of pictures with coupled drafts, too."""
    for seed in (3, 4):
        excess: list[float] = []
        rule = Grouped(span=1, gap=0.4)
        found = gap(tables, rule, 2, init, coupled, seed=seed, vocab=3, excess=excess)
        assert 1e-3 < found <= sum(excess)


class DrawnFromTheNewest(JacobiDrafter):
    """What does not stay is drawn from p, not from the residual."""

    def coupling(self, earlier, probs):
        old, chance, _ = super().coupling(earlier, probs)
        return old, chance, probs[:, 1:]


class AlwaysKept(JacobiDrafter):
    """A draft stays whatever the newest distribution says."""

    def coupling(self, earlier, probs):
        old, chance, rest = super().coupling(earlier, probs)
        return old, (chance > 0).to(chance.dtype), rest


class OnePlaceOff(JacobiDrafter):
    """A place's chance is that of the place before it."""

    def coupling(self, earlier, probs):
        old, chance, rest = super().coupling(earlier, probs)
        return old, chance.roll(1, dims=1), rest


def test_what_borrowing_costs_is_at_most_what_is_measured(tables):
    """LANTERN++'s certificate bounds the total variation of pictures with Jacobi drafts, too."""
    near = torch.tensor([[0, 1, 2], [1, 0, 2], [2, 1, 0]])
    for seed in (3, 4):
        excess: list[float] = []
        rule = LanternPP(near, k=1, lambda_=3.0)
        found = gap(tables, rule, 2, "above", seed=seed, vocab=3, excess=excess)
        assert 1e-3 < found <= sum(excess)


@pytest.mark.parametrize("make", [DrawnFromTheNewest, AlwaysKept, OnePlaceOff])
def test_broken_twins_are_noticed(tables, make):
    assert gap(tables, Recursive(), 3, make=make) > 1e-3
