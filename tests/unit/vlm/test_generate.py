"""``custom_generate`` on every family: pictures that generate has encoded before, videos, positions
given by it; with drafters, and planned for them.
"""

import pytest
import torch
import transformers as tf

import specmm
from specmm.core.processors import Processor
from specmm.hf.models.target import VLMTarget
from specmm.recipes.dflash import build_block
from specmm.recipes.msd import msd_config
from specmm.vlm.msd import MSDHead
from tests.generating import as_generate
from tests.tiny.parts import SIZES, ending


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "suffix", "recycle"])
def test_greedy_is_that_of_generate(zoo, family, method):
    model, inputs = zoo.model(family), zoo.batch(family, zoo.rows)
    assert as_generate(model, inputs, 10, None, method)


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_videos(zoo, family):
    video = [38, *[37] * 6, 39]
    # Qwen3 marks each frame
    row = [1, 5, *(video * 2 if family == "qwen3-vl" else [38, *[37] * 12, 39]), 6, 7, 8]
    ids = torch.tensor([row])
    pixels = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[2, 4, 6]])
    kinds = (ids == 37).int() * 2
    inputs = dict(
        input_ids=ids, pixel_values_videos=pixels, video_grid_thw=grid, mm_token_type_ids=kinds
    )
    inputs["attention_mask"] = torch.ones_like(ids)
    assert as_generate(zoo.model(family), inputs, 10)


def test_pictures_that_are_encoded_already_are_not_shown_to_another_model(zoo):
    model, small = zoo.model("llava"), zoo.model("llava", 1)
    fn = specmm.custom_generate(small, "vlm-draft")
    with pytest.raises(ValueError, match="needs the pictures"):
        model.generate(
            **zoo.batch("llava", zoo.rows), max_new_tokens=6, do_sample=False, custom_generate=fn
        )


@pytest.mark.parametrize(
    ("method", "sentence"),
    [("msd", "of method 'msd', got NoneType"), ("text-draft", "got NoneType")],
)
def test_a_missing_drafter_is_a_sentence(zoo, method, sentence):
    fn = specmm.custom_generate(method=method)
    with pytest.raises(ValueError, match=sentence):
        zoo.model("llava").generate(
            **zoo.batch("llava", zoo.rows), max_new_tokens=4, custom_generate=fn
        )


def msd_of(model):
    torch.manual_seed(1)
    head = MSDHead(msd_config(VLMTarget(model, Processor(0.0)))).eval()
    head.acceptance = {0.0: ((0.9,), (0.9,))}
    return head


def block_of(model):
    return build_block(VLMTarget(model, Processor(0.0)), 1, 4, 39, read=1)


def test_msd_drafts_for_a_model_without_pictures():
    model = ending(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=40, **SIZES)).eval())
    ids = torch.tensor([[5, 6, 7, 5, 6], [0, 0, 9, 8, 7]])
    inputs = dict(input_ids=ids, attention_mask=(ids > 0).long())
    assert as_generate(model, inputs, 12, msd_of(model), "msd")


@pytest.mark.parametrize("drafter_of", [msd_of, block_of])
def test_auto_plans_for_the_drafter_and_changes_nothing(zoo, drafter_of):
    model = zoo.model("llava")
    fn = specmm.custom_generate(drafter_of(model), "auto")
    options = dict(max_new_tokens=12, do_sample=False, no_repeat_ngram_size=2)
    given = options | zoo.batch("llava", zoo.rows[:1])
    wanted = model.generate(**given)
    for _ in range(2):  # the second call goes by what the first one planned
        assert torch.equal(model.generate(**given, custom_generate=fn), wanted)


@pytest.mark.parametrize("drafter_of", [msd_of, block_of, lambda model: None])
def test_auto_chooses_between_the_drafter_and_plain_decoding(zoo, drafter_of):
    model = zoo.model("llava")
    how = specmm.custom_generate(drafter_of(model), "auto")
    given = dict(zoo.batch("llava", zoo.rows), max_new_tokens=40, do_sample=False)
    wanted = model.generate(**given)
    ran = []
    for _ in range(8):
        assert torch.equal(model.generate(**given, custom_generate=how), wanted)
        ran.append(how.last.method)
    known = bool(getattr(drafter_of(model), "acceptance", None))
    assert known or ran[0] == "AR()", "nothing is known of a drafter, and the call is short"


def test_samples_follow_the_generator(zoo):
    def sample(seed):
        fn = specmm.custom_generate(generator=torch.Generator().manual_seed(seed))
        given = dict(max_new_tokens=12, do_sample=True, top_k=2, custom_generate=fn)
        return zoo.model("llava").generate(**zoo.batch("llava", zoo.rows), **given)

    assert torch.equal(sample(0), sample(0)) and not torch.equal(sample(0), sample(1))
