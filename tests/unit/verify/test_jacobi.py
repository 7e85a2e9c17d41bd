"""Jacobi decoding keeps the target's distribution to 1e-12, by enumerating all that may happen in
all rounds; coupled, it does not under rules that look at later drafts, and its broken twins do not.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specmm.image_ar.tokens.drafters.corrector import Corrector, CorrectorConfig
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.processors import Processor
from specmm.training import seeded
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
    drafter = make(drawing(given["length"], given["vocab"]), window, init, coupled)
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


class ReadsItsOwnDraft(JacobiDrafter):
    """Corrects by the last round's draft of the place itself, which settles nothing about it."""

    def _corrected(self, corrector, feedback):
        _, there = super()._corrected(corrector, feedback)
        node = (feedback.result.kept[:, None] + 1).clamp(max=self.window)
        own = feedback.tree.tokens.gather(1, node)
        leaning = torch.where(own == 0, 0.9, 0.1)[..., None]
        return leaning * torch.tensor([1.0, 0.0]) + (1 - leaning) * torch.tensor([0.0, 1.0]), there


def correcting(kind, target, *options, seed=0):
    """A drafter with a corrector that changes much, of this ``kind``."""
    with seeded(seed):
        corrector = Corrector(CorrectorConfig(target.sizes)).double()
        torch.nn.init.normal_(corrector.write.weight, std=2.0)
    return kind(target, *options, corrector.requires_grad_(False))


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("coupled", [False, True])
def test_corrected_drafts_are_exact_token_by_token(tables, init, window, coupled):
    make = partial(correcting, JacobiDrafter)
    for seed in (3, 4):
        assert gap(tables, Recursive(), window, init, coupled, make, seed=seed) < 1e-12
    assert gap(tables, PointMass(), window, init, coupled, make) < 1e-12


@pytest.mark.parametrize("rule", [Block(), Traversal()], ids=lambda rule: rule.name)
def test_corrected_drafts_drawn_afresh_are_exact_under_rules_that_look_ahead(tables, rule):
    make = partial(correcting, JacobiDrafter)
    assert gap(tables, rule, 3, coupled=False, make=make) < 1e-12
    assert gap(tables, rule, 3, coupled=True, make=make) > 1e-3


def test_a_corrector_that_reads_the_draft_itself_is_noticed(tables):
    assert gap(tables, Recursive(), 3, make=partial(correcting, ReadsItsOwnDraft)) > 1e-3


@pytest.mark.parametrize("make", [JacobiDrafter, partial(correcting, JacobiDrafter)])
def test_what_borrowing_costs_is_at_most_what_is_measured(tables, make):
    """LANTERN++'s certificate bounds the total variation of pictures with Jacobi drafts, too."""
    near = torch.tensor([[0, 1, 2], [1, 0, 2], [2, 1, 0]])
    for seed in (3, 4):
        excess: list[float] = []
        rule = LanternPP(near, k=1, lambda_=3.0)
        found = gap(tables, rule, 2, "above", make=make, seed=seed, vocab=3, excess=excess)
        assert 1e-3 < found <= sum(excess)


@pytest.mark.parametrize("make", [DrawnFromTheNewest, AlwaysKept, OnePlaceOff])
def test_broken_twins_are_noticed(tables, make):
    assert gap(tables, Recursive(), 3, make=make) > 1e-3
