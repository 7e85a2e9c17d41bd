"""A cache that generate is given: turns of a chat read only what is new, and it is filled as by
generate itself.
"""

import pytest
import torch
import transformers as tf

import specmm
from specmm.core.processors import Processor
from specmm.hf.models.target import VLMTarget
from specmm.recipes.msd import msd_config
from specmm.vlm.msd import MSDHead
from tests.tiny import parts

SIZES = parts.TEXT | dict(vocab_size=40)
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=5)),
}
KINDS = {
    "dynamic": lambda model: tf.DynamicCache(config=model.config.get_text_config()),
    "static": lambda model: tf.StaticCache(model.config.get_text_config(), max_cache_len=200),
}
FIRST = torch.tensor([[1, 5, 6, 7, 5, 6]])
ASKED = torch.tensor([[9, 10, 5, 6]])
GREEDY = dict(max_new_tokens=12, do_sample=False)


def model_of(name):
    torch.manual_seed(0)
    return parts.ending(parts.shaken(MODELS[name](), 0))


def turns(model, cache, first, count=3, **options):
    """Each turn's text so far, as generate answers it with ``cache``."""
    ids, found = first, []
    for _ in range(count):
        seen = torch.ones_like(ids)  # an answer may have the token for padding
        ids = model.generate(ids, attention_mask=seen, past_key_values=cache, **options)
        found.append(ids)
        ids = torch.cat([ids, ASKED], 1)
    return found


def keys_of(cache, layer):
    kept = cache.layers[layer]
    return kept.keys[:, :, : kept.get_seq_length()]


@pytest.fixture
def read(monkeypatch):
    """How many tokens each forward of a prompt or tree has."""
    counts = []
    states, run = VLMTarget.states, specmm.hf.models.families.Family.run
    monkeypatch.setattr(
        VLMTarget,
        "states",
        lambda self, tokens, *rest: counts.append(tokens.shape[1]) or states(self, tokens, *rest),
    )
    monkeypatch.setattr(
        specmm.hf.models.families.Family,
        "run",
        lambda self, given: counts.append(given["input_ids"].shape[1]) or run(self, given),
    )
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ar", "suffix", "auto"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_turns_of_a_chat(name, method, kind):
    model = model_of(name)
    ours, theirs = KINDS[kind](model), KINDS[kind](model)
    fn = specmm.custom_generate(method=method)
    found = turns(model, ours, FIRST, custom_generate=fn, **GREEDY)
    wanted = turns(model, theirs, FIRST, **GREEDY)
    assert all(map(torch.equal, found, wanted))
    assert ours.get_seq_length() == theirs.get_seq_length() == found[-1].shape[1] - 1
    for layer in range(2):
        assert torch.allclose(keys_of(ours, layer), keys_of(theirs, layer), atol=1e-5)


def test_what_a_cache_holds_is_not_read_again(read):
    model, fn = model_of("llama"), specmm.custom_generate(method="ar")
    ids = torch.arange(3, 39)[None]
    cache = tf.DynamicCache(config=model.config)
    model.generate(ids, past_key_values=cache, custom_generate=fn, **GREEDY)
    first = max(read)
    read.clear()
    wanted = model.generate(torch.cat([ids, ASKED], 1), **GREEDY)
    cache.crop(ids.shape[1] - cache.get_seq_length())
    found = model.generate(
        torch.cat([ids, ASKED], 1), past_key_values=cache, custom_generate=fn, **GREEDY
    )
    assert torch.equal(found, wanted)
    assert (first, max(read)) == (36, 4)


def test_generate_goes_on_from_ours_and_we_from_its(read):
    model, fn = model_of("llama"), specmm.custom_generate()
    wanted = turns(model, None, FIRST, **GREEDY)
    cache, ids = tf.DynamicCache(config=model.config), FIRST
    for turn in range(3):
        how = {} if turn % 2 else {"custom_generate": fn}
        ids = model.generate(ids, past_key_values=cache, **GREEDY, **how)
        assert torch.equal(ids, wanted[turn])
        ids = torch.cat([ids, ASKED], 1)


def test_samples_are_those_of_the_whole_prompt():
    model = model_of("llama")
    options = dict(max_new_tokens=12, do_sample=True, temperature=1.3)

    def sampled(cache, seed):
        fn = specmm.custom_generate(generator=torch.Generator().manual_seed(seed))
        return turns(model, cache, FIRST, 2, custom_generate=fn, **options)

    for seed in range(4):
        cache = tf.DynamicCache(config=model.config)
        assert all(map(torch.equal, sampled(cache, seed), sampled(None, seed)))


def test_a_cache_is_returned():
    model, fn = model_of("llama"), specmm.custom_generate()
    cache = tf.DynamicCache(config=model.config)
    options = dict(return_dict_in_generate=True, custom_generate=fn)
    found = model.generate(FIRST, past_key_values=cache, **GREEDY, **options)
    assert cache in (getattr(found, "cache", None), getattr(found, "past_key_values", None))
    assert cache.get_seq_length() == found.sequences.shape[1] - 1
    assert cache not in model.generate(FIRST, **GREEDY, **options).values()


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl"])
def test_a_picture_is_not_read_again(zoo, name, read):
    model = zoo.model(name)
    shown = zoo.batch(name, zoo.rows[:1])
    ids = shown.pop("input_ids")
    shown = {k: v for k, v in shown.items() if k not in ("attention_mask", "mm_token_type_ids")}
    stand_ins = specmm.hf.models.families.Family.of(model).image_tokens
    options = dict(shown, suppress_tokens=list(stand_ins), **GREEDY)
    wanted = model.generate(ids, **options)
    asked = torch.cat([wanted, ASKED], 1)
    cache = KINDS["dynamic"](model)
    ours = dict(options, past_key_values=cache, custom_generate=specmm.custom_generate())
    assert torch.equal(model.generate(ids, **ours), wanted)
    read.clear()
    assert torch.equal(model.generate(asked, **ours), model.generate(asked, **options))
    assert max(read) < ids.shape[1]


def refused(model, cache, *ids, drafter=None, **options):
    fn = specmm.custom_generate(drafter)
    with pytest.raises(ValueError) as error:
        model.generate(*ids, past_key_values=cache, custom_generate=fn, **GREEDY, **options)
    return str(error.value)


@torch.no_grad()
def test_caches_that_cannot_be_gone_on_from(zoo):
    model = model_of("llama")
    cache = tf.DynamicCache(config=model.config)
    model(FIRST[:, :4], past_key_values=cache)
    two = torch.tensor([[0, 0, 1, 5, 6, 7], [1, 5, 6, 7, 5, 6]])
    said = refused(model, cache, two, attention_mask=(two > 0).long())
    assert "of one prompt without padding, got 2 rows" in said
    assert "longer than the 4 tokens that its cache holds, got 3" in refused(
        model, cache, FIRST[:, :3]
    )
    head = MSDHead(msd_config(VLMTarget(model, Processor(0.0)))).eval()
    assert "a drafter that reads the model's states" in refused(model, cache, FIRST, drafter=head)
    assert cache.get_seq_length() == 4
    model = model_of("mistral")
    cache = tf.DynamicCache(config=model.config)
    model(FIRST[:, :4], past_key_values=cache)
    assert "got a DynamicSlidingWindowLayer; leave it out" in refused(model, cache, FIRST)
    model = zoo.model("llava")
    batch = zoo.batch("llava", zoo.rows[:1])
    ids = batch.pop("input_ids")
    cache = KINDS["dynamic"](model)
    model.model.language_model(ids[:, :1], past_key_values=cache)
    assert "pictures must be among the 1 tokens" in refused(model, cache, ids, **batch)
