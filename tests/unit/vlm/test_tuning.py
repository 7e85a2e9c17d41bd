"""Method ``auto`` for questions: acceptance measured on real loops travels with the head, and
decides.
"""

import pytest
import torch

from specmm import methods
from specmm.choose.contest import Candidate
from specmm.core.processors import Processor
from specmm.hf.drafters.features import candidates, measure_acceptance
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.msd import build_msd
from specmm.vlm.msd import load_msd, save_msd


@pytest.fixture(scope="module")
def target(zoo):
    return VLMTarget(zoo.model("llava"), Processor(1.0))


@pytest.fixture(scope="module")
def head(target):
    return build_msd(target, seed=1).eval()


@pytest.fixture
def prompt():
    return VLMPrompt({"input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 3]])}, 30)


def test_acceptance_is_a_distribution_over_ranks(target, head, prompt):
    table = torch.tensor(measure_acceptance(target, head, [prompt], [2], levels=3))
    assert table.shape == (3, 6)
    assert bool((table >= 0).all()) and bool((table.sum(1) <= 1 + 1e-6).all())
    assert table[0].sum() > 0


def test_acceptance_survives_the_disk(target, head, tmp_path):
    head.acceptance = {0.0: ((0.9, 0.05), (0.8, 0.1)), 1.0: ((0.5, 0.25), (0.4, 0.2))}
    save_msd(head, tmp_path, embeddings=False)
    found = load_msd(tmp_path, target.embed(torch.arange(head.config.vocab_size))).acceptance
    assert found == head.acceptance


def test_auto_tries_the_trees_of_what_was_accepted(target, head):
    head.acceptance = {}
    assert candidates(target, head, methods.MSD()) == [Candidate(methods.MSD())]
    head.acceptance = {0.0: ((0.001,), (0.001,)), 1.0: ((0.8, 0.1), (0.7, 0.1))}
    sampled = candidates(target, head, methods.MSD())
    assert [one.nodes for one in sampled] == [4, 7] and sampled[0].levels == 2, "all there are"
    assert all(one.method.sampled and len(one.method.tree) == one.nodes for one in sampled)
    assert sampled[0].tau == pytest.approx(1 + 0.8 + 0.8 * 0.7 + 0.1)
    greedy = candidates(VLMTarget(target.model, Processor(0.0)), head, methods.MSD())
    assert all(one.tau < 1.01 for one in greedy)
