"""Method ``auto`` for questions: acceptance measured on real loops travels with the head, and
decides.
"""

import pytest
import torch

from specmm import methods
from specmm.hf.drafters.features import choose_method, measure_acceptance
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.msd import msd_config
from specmm.vlm.msd import MSDHead, load_msd, save_msd


@pytest.fixture(scope="module")
def target(zoo):
    return VLMTarget(zoo.model("llava"), Processor(1.0))


@pytest.fixture(scope="module")
def head(target):
    torch.manual_seed(1)
    made = MSDHead(msd_config(target)).eval()
    made.embed_tokens.weight.data.copy_(target.embed(torch.arange(made.config.vocab_size)))
    return made


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


def test_hopeless_or_unknown_acceptance_means_plain_decoding(target, head, prompt):
    head.acceptance = {}
    assert choose_method(target, head, prompt, {}, methods.MSD()) == methods.AR()
    head.acceptance = {1.0: ((0.001,), (0.001,))}
    plans = {}
    assert choose_method(target, head, prompt, plans, methods.MSD()) == methods.AR()
    assert (
        choose_method(target, head, prompt, plans, methods.MSD()) == methods.AR()
        and len(plans) == 1
    ), "planned once"


@pytest.mark.slow
def test_certain_drafts_are_taken_from_a_deep_target(zoo, prompt):
    deep = VLMTarget(zoo.of_depth(16).model("llava"), Processor(0.0))
    made = MSDHead(msd_config(deep)).eval()
    made.acceptance = {0.0: ((0.99,),) * 4, 1.0: ((0.001,),) * 4}
    chosen = choose_method(deep, made, prompt, {}, methods.MSD())
    assert isinstance(chosen, methods.MSD) and chosen.sampled, (
        "four sure tokens a round against sixteen layers a token"
    )
    full = VLMPrompt({"input_ids": torch.ones(1, 250, dtype=torch.int64)}, 5)
    plans = {}
    assert choose_method(deep, made, full, plans, methods.MSD()) == methods.AR()
    assert "no room to measure" in next(iter(plans.values())).reason
