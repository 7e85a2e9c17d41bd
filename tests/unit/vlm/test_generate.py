"""``custom_generate`` on every family: pictures that generate has encoded before, videos, positions
given by it.
"""

import pytest
import torch

import specmm


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_greedy_is_that_of_generate(zoo, family, method):
    model, inputs = zoo.model(family), zoo.batch(family, zoo.rows)
    wanted = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    fn = specmm.custom_generate(method=method)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=10, do_sample=False, custom_generate=fn), wanted
    )


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_videos(zoo, family):
    video = [38, *[37] * 6, 39]
    row = [
        1,
        5,
        *(video * 2 if family == "qwen3-vl" else [38, *[37] * 12, 39]),
        6,
        7,
        8,
    ]  # Qwen3 marks each frame
    ids = torch.tensor([row])
    pixels = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[2, 4, 6]])
    kinds = (ids == 37).int() * 2
    inputs = dict(
        input_ids=ids, pixel_values_videos=pixels, video_grid_thw=grid, mm_token_type_ids=kinds
    )
    inputs["attention_mask"] = torch.ones_like(ids)
    model = zoo.model(family)
    wanted = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    fn = specmm.custom_generate()
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=10, do_sample=False, custom_generate=fn), wanted
    )


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
