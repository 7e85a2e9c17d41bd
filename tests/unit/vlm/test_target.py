"""Every class of model after one target: greedy decoding equals generate, rows do not depend on
their batch.
"""

import pytest
import torch

from specmm import methods
from specmm.core.decode import decode, decode_plain
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.prompt_lookup import PromptLookupDrafter
from specmm.hf.drafters.small_model import SmallModel
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.verify import Recursive

LENGTH = 14


def last(progress):
    *_, end = progress
    return end


def plain(target, inputs, length=LENGTH, seeds=(0, 1, 2)):
    uniforms = Uniforms.from_seeds(seeds[: len(inputs["input_ids"])])
    return last(decode_plain(target, VLMPrompt(inputs, length), length, uniforms)).tokens[
        :, :length
    ]


def lookup(target, inputs, length=LENGTH, seeds=(0, 1, 2)):
    uniforms = Uniforms.from_seeds(seeds[: len(inputs["input_ids"])])
    drafter = PromptLookupDrafter(target)
    return last(
        decode(target, drafter, Recursive(), VLMPrompt(inputs, length), length, uniforms)
    ).tokens[:, :length]


def generated(zoo, model, family):
    """Each row alone through generate."""
    rows = []
    for row in zoo.rows:
        inputs = zoo.batch(family, [row])
        out = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        rows.append(out[0, inputs["input_ids"].shape[1] :])
    return torch.stack(rows)


def test_greedy_decoding_equals_generate(zoo, family):
    model = zoo.model(family)
    target, inputs = VLMTarget(model, Processor(0)), zoo.batch(family, zoo.rows)
    wanted = generated(zoo, model, family)
    assert len(wanted.unique()) > 4
    assert torch.equal(plain(target, inputs), wanted)
    assert torch.equal(lookup(target, inputs), wanted)


@pytest.mark.parametrize("penalty", [0.9, 1.1, 1.3])
def test_penalties_see_every_token_of_a_round(zoo, penalty):
    """Also after many accepted drafts: the target is its own drafter, with a chain of four."""
    world = zoo.of_vocabulary(200)
    model, kept = world.model("llava"), [0] * 5
    target = VLMTarget(model, Processor(0, repetition_penalty=penalty))
    for row in zoo.rows:
        inputs = world.batch("llava", [row])
        wanted = model.generate(
            **inputs, max_new_tokens=40, repetition_penalty=penalty, do_sample=False
        )
        drafter, rule = assemble(methods.VLMDraft((1, 1, 1, 1)), target, SmallModel(model))
        prompt, uniforms = VLMPrompt(inputs, 40), Uniforms.from_seeds([0])
        end = last(decode(target, drafter, rule, prompt, 40, uniforms))
        assert torch.equal(end.tokens[0, :40], wanted[0, inputs["input_ids"].shape[1] :])
        kept = [a + b for a, b in zip(kept, end.stats.kept, strict=True)]
    assert sum(kept[2:]) > 5, "few rounds committed three tokens or more: the test says little"
