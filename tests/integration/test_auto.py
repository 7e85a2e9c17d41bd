"""Method ``auto``: acceptance measured on a real loop, a plan from real seconds, plain decoding where it loses."""

import pytest
import torch

from specmm import methods
from specmm.image_ar.tokens.acceptance import measure_acceptance
from specmm.image_ar.tokens.assemble import Parts, tree_shape
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.image_ar.tokens.target import Guidance, LlamaGenTarget, Prompt
from specmm.image_ar.tokens.tuning import choose_method, measure_costs, planned_for
from specmm.processors import Processor


@pytest.fixture(scope="module")
def parts_and_target():
    torch.manual_seed(0)
    model = Transformer(GPTConfig(32, 2, 2, 24, 36, num_classes=3)).eval()
    head = BlockHead(BlockConfig(3, 2, model.config)).eval()
    return Parts({"block": head}), LlamaGenTarget(model, Guidance(1.5), Processor())


def test_acceptance_is_a_law_over_ranks(parts_and_target):
    parts, target = parts_and_target
    table = torch.tensor(measure_acceptance(parts.head("block"), target, Prompt(torch.tensor([0, 1, 2])), [1, 2, 3]))
    assert table.shape == (3, 6)
    assert bool((table >= 0).all()) and bool((table.sum(1) <= 1 + 1e-6).all())
    assert table[0].sum() > 0.3, "an untrained head and an untrained target are both nearly uniform"


def test_costs_are_positive_and_without_acceptance_nothing_is_drafted(parts_and_target):
    parts, target = parts_and_target
    costs = measure_costs(target, parts, batch=2, repeats=2)
    assert costs.step > 0 and costs.host > 0 and costs.round(4, 2) > 0
    assert choose_method(target, parts, 2) == methods.AR()
    assert "no measured acceptance" in planned_for(target, parts, 2).reason


def test_hopeless_drafts_fall_back_and_certain_ones_are_taken(parts_and_target):
    parts, target = parts_and_target
    hopeless = Parts(parts.drafters, acceptance=((0.001,), (0.001,), (0.001,)))
    assert choose_method(target, hopeless, 1) == methods.AR()
    slow = LlamaGenTarget(Transformer(GPTConfig(32, 24, 2, 24, 36, num_classes=3)).eval(), Guidance(), Processor())
    head = BlockHead(BlockConfig(3, 2, slow.model.config)).eval()
    certain = Parts({"block": head}, acceptance=((0.99,), (0.99,), (0.99,)))
    chosen = choose_method(slow, certain, 1)
    assert isinstance(chosen, methods.Speculative), "three sure tokens a round against 24 layers a token"
    assert tree_shape(chosen.tree, "auto", certain).depth >= 2
