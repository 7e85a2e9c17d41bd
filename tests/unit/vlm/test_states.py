"""Vision-language models with states: ragged batches with two pictures, none and one."""

import pytest
import torch

from specmm import methods
from specmm.core.decode import decode, decode_plain
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.drafters.drafting import assemble
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.recipes.msd import build_msd

LENGTH = 20
METHODS = {"ar": None, "prompt-lookup": methods.PromptLookup(1, 5), "msd": methods.MSD()}
METHODS |= {"suffix": methods.Suffix(), "recycle": methods.Recycle()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_answers_about_pictures_equal_generate(zoo, name, method):
    model = zoo.model(name)
    wanted = []
    for row in zoo.rows:
        alone = zoo.batch(name, [row])
        found = model.generate(**alone, max_new_tokens=LENGTH, do_sample=False)
        wanted.append(found[0, alone["input_ids"].shape[1] :])
    assert len(torch.stack(wanted).unique()) > 4
    target = VLMTarget(model, Processor(0))
    prompt = VLMPrompt(zoo.batch(name, zoo.rows), LENGTH)
    uniforms = Uniforms.from_seeds([0, 1, 2])
    chosen = METHODS[method]
    if chosen is None:
        *_, end = decode_plain(target, prompt, LENGTH, uniforms)
    else:
        parts = assemble(chosen, target, build_msd(target, seed=1) if method == "msd" else None)
        *_, end = decode(target, *parts, prompt, LENGTH, uniforms)
    assert torch.equal(end.tokens[:, :LENGTH], torch.stack(wanted))
