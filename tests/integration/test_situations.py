"""What people meet where two parts meet: modes, contexts, settings of checkpoints, ids."""

import json
import logging
import re
import shutil

import pytest
import torch
import transformers as tf

import specmm
from specmm.core.processors import Processor
from specmm.hf.drafters.drafting import load_drafter
from specmm.hf.loading import pretrained
from specmm.hf.models.target import VLMTarget
from tests.noisy import noisy
from tests.tiny.saying import saying

METHODS = ["ar", "prompt-lookup"]


def generated(model, ids, method=None, length=8):
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length)
    fn = {} if method is None else dict(custom_generate=specmm.custom_generate(method=method))
    return model.generate(**given, do_sample=False, **fn)


# ---- modes


@pytest.mark.parametrize("method", METHODS)
def test_a_training_goes_on_in_its_mode(method):
    """Dropout is off within a call and on after it, in the parts where it was on."""
    model, words = saying("abcd", attention_dropout=0.5)
    ids = words("a b a", return_tensors="pt")["input_ids"]
    wanted = generated(model, ids)
    model.train()
    model.model.norm.eval()  # frozen by hand
    modes = [module.training for module in model.modules()]
    pipe = specmm.TextPipeline(model, words)
    assert (
        pipe("a b a", max_new_tokens=8, method=method).tokens[0].tolist() == wanted[0, 3:].tolist()
    )
    assert torch.equal(generated(model, ids, method), wanted)
    list(pipe.stream("a b a", max_new_tokens=8, method=method))
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="max_new_tokens"):
        pipe("a b a", max_new_tokens=1000, method=method)
    assert [module.training for module in model.modules()] == modes


def test_drafters_follow_a_model_that_was_moved_by_itself(tiny):
    """pipe.model.to(dtype) leaves the drafters, which are no part of it, to the next call."""
    texts = specmm.TextPipeline.from_pretrained("pocket/coder", dtype=torch.float32)
    pictures = specmm.ImagePipeline.from_pretrained(tiny, dtype=torch.float32)
    answer = {m: texts("def f(", max_new_tokens=6, method=m).texts for m in ("block", "deer")}
    for dtype in (torch.bfloat16, torch.float32):
        texts.model.to(dtype)
        pictures.transformer.to(dtype)
        for method, wanted in answer.items():
            found = texts("def f(", max_new_tokens=6, method=method).texts
            assert dtype != torch.float32 or found == wanted
        for method in ("speculative", "eagle"):
            assert pictures(classes=[0], seed=1, method=method).images


# ---- contexts of scaled rotary embeddings

ROPE = {
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        factor=4.0,
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
}


def scaled(kind):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = tf.Qwen2Config(
        vocab_size=96,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rope_parameters=dict(rope_theta=1e4, **ROPE[kind]),
        pad_token_id=0,
        eos_token_id=None,
        **sizes,
    )
    model = tf.Qwen2ForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("length", [20, 48, 120])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ROPE)
def test_scaled_contexts_are_served(kind, method, length):
    model = scaled(kind)
    ids = torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(length))
    if kind == "dynamic" and method != "ar" and length > 20:
        with pytest.raises(ValueError, match=r"within the first 32 positions .* use method='ar'"):
            generated(model, ids, method)
        return
    wanted = generated(model, ids)
    assert torch.equal(generated(model, ids, method), wanted)


def test_there_is_an_end_to_scaled_contexts():
    with pytest.raises(ValueError, match="must fit the 128 positions"):
        generated(scaled("yarn"), torch.full((1, 121), 5), "ar")


# ---- settings of checkpoints


def test_texts_that_end_a_checkpoints_answers_end_ours():
    model, words = saying("abcdefgh")
    model.generation_config.stop_strings = ["de"]
    pipe = specmm.TextPipeline(model, words)
    assert pipe("a", max_new_tokens=7).texts == ["bc"]
    assert pipe("a", max_new_tokens=7, stop="g").texts == ["bcdef"], (
        "as in generate, others instead"
    )
    assert "".join(part[0] for part in pipe.stream("a", max_new_tokens=7)) == "bc"


@pytest.fixture
def llava(tmp_path):
    shutil.copytree(pretrained.find("pocket/llava"), tmp_path / "llava")
    return tmp_path / "llava"


def test_a_chat_model_without_its_template_is_named(llava, caplog):
    with caplog.at_level(logging.WARNING, "specmm"):
        specmm.VQAPipeline.from_pretrained(llava)
        assert not caplog.records
        (llava / "chat_template.jinja").unlink()
        specmm.VQAPipeline.from_pretrained(llava)
    assert "has no chat template, so questions go in as they are" in caplog.text


def test_a_processor_that_lacks_a_setting_is_told_which(llava):
    file = llava / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": None}))
    pipe = specmm.VQAPipeline.from_pretrained(llava)
    with pytest.raises(ValueError, match="its config has no patch_size, which the model's tells"):
        pipe(noisy((96, 96), 1), "What is it?", max_new_tokens=4)


def test_a_quantiser_that_is_not_installed_is_one_sentence(llava):
    file = llava / "config.json"
    asked = {"quant_method": "aqlm", "in_group_size": 8}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": asked}))
    with pytest.raises(ValueError, match=r"needs a package that is not .*aqlm") as caught:
        specmm.VQAPipeline.from_pretrained(llava)
    assert "\n" not in str(caught.value)


# ---- ids that a model has no row of


def test_tokens_that_the_tokenizer_knows_alone_are_one_sentence():
    pipe = specmm.TextPipeline.from_pretrained("pocket/coder")
    with pytest.raises(ValueError, match="only the 4096 tokens that pocket/coder has, got 4096"):
        pipe("a<|endoftext|>b", max_new_tokens=4)


def test_a_drafter_with_such_a_tokenizer_drafts():
    model, words = saying("abcd", specials=("<|endoftext|>",))
    drafter = load_drafter("text-draft", pretrained.find("pocket/coder"), model)
    pipe = specmm.TextPipeline(model, words, "text-draft", drafter)
    assert pipe("a b c", max_new_tokens=6).texts == ["dabcda"]


def test_weights_that_are_nowhere_are_one_sentence():
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match="must have weights on a device, got none there"):
        VLMTarget(model, Processor(0.0))


# ---- targets that do something to their numbers


class Rounded(torch.nn.Linear):
    """A product of inputs in 8 bits of the whole input's range, as quantisers make it."""

    bits = 127

    def forward(self, x):
        step = x.abs().amax() / self.bits
        return super().forward((x / step).round() * step)


def rounded(model, bits=127):
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Rounded
            module.bits = bits
    return model


def with_quantised_layers(model):
    """As PyTorch's own quantiser makes them: their weights are functions."""
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})


@pytest.mark.parametrize("quantise", [rounded, with_quantised_layers])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_rounds_its_inputs_is_served(method, quantise, caplog):
    """Its own forwards of one token and of several differ."""
    model = quantise(scaled("yarn"))
    ids = torch.tensor([[5, 6, 7, 8, 5, 6]])
    custom = specmm.custom_generate(method=method)
    with caplog.at_level(logging.WARNING, "specmm"):
        found = model.generate(ids, custom_generate=custom, max_new_tokens=8, do_sample=False)
    assert "two forwards of its own differ by" in caplog.text
    said = str(custom.last.certificate)
    assert re.search(r"forwards that differ by \d+\.\d% of their range\)", said)
    assert torch.equal(found, generated(model, ids))


def test_what_differs_by_more_than_the_model_itself_is_refused(monkeypatch):
    from specmm.hf.models import probe

    ours = probe._ours
    monkeypatch.setattr(probe, "_ours", lambda *given: ours(*given) * 0.7 + 0.1)
    said = r"differ from its own by \d.*, its own forwards by \d"
    with pytest.raises(ValueError, match=said):
        generated(rounded(scaled("yarn")), torch.tensor([[5, 6, 7, 8, 5, 6]]), "ar")


# ---- auto beside several drafters
