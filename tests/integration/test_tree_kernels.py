"""Where Triton runs, answers and texts are scored by the tree kernel, and no dense mask is made.

Here it runs in Triton's interpreter, which is slow: models are tiny, texts short.
"""

import logging

import pytest
import torch
import transformers as tf

import specmm
from specmm.cache import Cache
from specmm.hf.pretrained import use_tree_attention
from specmm.hf.target import VLMTarget
from specmm.kernels.tree_attention import interface
from specmm.methods import MSD, Block

CODE, QUESTION = "def add(a, b):", "How many?"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for the CPU")


@pytest.fixture
def kernel_calls(monkeypatch):
    """Kernels are Triton's; a dense mask is an error; what comes back counts their calls."""
    calls, real = [], interface.tree_attention
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    monkeypatch.setattr(interface, "tree_attention", lambda *given: calls.append(1) or real(*given))
    return calls


@pytest.fixture
def no_dense_masks(monkeypatch):
    """A dense mask for the target's tree is an error; drafters of other kinds keep theirs."""
    score, bias, scoring = VLMTarget.score, Cache.tree_bias, []

    def watched(target, tree):
        scoring.append(target)
        try:
            return score(target, tree)
        finally:
            scoring.pop()

    def dense(cache, ancestors):
        assert not scoring, "a dense mask was made"
        return bias(cache, ancestors)

    monkeypatch.setattr(VLMTarget, "score", watched)
    monkeypatch.setattr(Cache, "tree_bias", dense)


@pytest.mark.parametrize("method", ["prompt-lookup", Block(tree=(2, 1))], ids=str)
def test_texts(text_folder, kernel_calls, no_dense_masks, method):
    plain = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    wanted = plain(CODE * 2, max_new_tokens=6).texts
    pipe = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    assert pipe.model.config._attn_implementation == interface.NAME
    assert pipe(CODE * 2, max_new_tokens=6, method=method).texts == wanted
    assert kernel_calls


@pytest.mark.parametrize("method", ["prompt-lookup", MSD(sampled=True, tree=(2, 1))], ids=str)
def test_answers(kernel_calls, no_dense_masks, method):
    from PIL import Image

    picture = Image.new("RGB", (64, 64), "red")
    pipe = specmm.VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)
    assert pipe.model.config.get_text_config()._attn_implementation == interface.NAME
    assert pipe.model.config.vision_config._attn_implementation != interface.NAME
    wanted = pipe(picture, QUESTION, max_new_tokens=5).answers
    assert pipe(picture, QUESTION, max_new_tokens=5, method=method).answers == wanted
    assert kernel_calls


def test_a_dense_mask_is_seen(text_folder, monkeypatch, no_dense_masks):
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    pipe = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    with pytest.raises(AssertionError, match="a dense mask was made"):
        pipe(CODE * 2, max_new_tokens=6, method="prompt-lookup")


def test_without_triton_models_stay_as_they_are(text_folder, monkeypatch):
    monkeypatch.setenv("SPECMM_KERNELS", "torch")
    pipe = specmm.TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)
    assert pipe.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        (dict(sliding_window=4), "layers that see a window"),
        (dict(sliding_window=None, attn_implementation="eager"), "its attention is eager"),
    ],
)
def test_attention_that_the_kernel_does_not_know_is_left(monkeypatch, caplog, sizes, why):
    monkeypatch.setenv("SPECMM_KERNELS", "triton")
    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = tf.MistralConfig(vocab_size=20, num_key_value_heads=2, head_dim=8, **small, **sizes)
    model = tf.MistralForCausalLM(config)
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING):
        use_tree_attention(model)
    assert model.config._attn_implementation == before and why in caplog.text
