"""The sizes that ``published.json`` estimates are those of the parameters: of our own modules, and
of transformers' by the releases' configurations.
"""

import json

import pytest
import torch
import transformers as tf

from benchmarks.gpu import published as sizes
from specmm.image_ar.continuous.mar import MAR, MARConfig
from specmm.image_ar.continuous.mar import PUBLISHED as MARS
from specmm.image_ar.scales import var as scales
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import GPTConfig, Transformer
from specmm.loading import mapped
from specmm.vlm.msd import MSDConfig, MSDHead
from specmm.zoo import published
from specmm.zoo.published import published_models

FLOAT, HALF = 4, 2  # bytes of a parameter
FILES = json.loads(published.REGISTRY.read_text())["files"]
VARS = {
    **{f"var-d{depth}": depth for depth in (16, 20, 24, 30)},
    **{f"var-code-{n}-drafter": 30 for n in (6, 7, 8, 9)},
    **{f"var-code-{n}-refiner": 16 for n in (6, 7, 8, 9)},
}
GPTS = ["c2i-l-384", "c2i-3b-384", "t2i-xl-256", "t2i-xl-256-lantern", "t2i-xl-512-lantern"]
GPTS = [f"llamagen-{name}" for name in GPTS]


def text(vocabulary, width, inner, layers, heads, kv_heads=None, **others):
    sizes = dict(vocab_size=vocabulary, hidden_size=width, intermediate_size=inner)
    sizes |= dict(num_hidden_layers=layers, num_attention_heads=heads)
    return sizes | dict(num_key_value_heads=kv_heads or heads) | others


QWEN3_4B = tf.Qwen3Config(
    **text(151936, 2560, 9728, 36, 32, 8, head_dim=128, tie_word_embeddings=True)
)
QWEN2_7B = text(152064, 3584, 18944, 28, 28, 4)
LLAMA_13B = text(32064, 5120, 13824, 40, 40)
MODELS = {  # whole repositories of transformers, in half precision
    "llava-1.5-7b": (tf.LlavaForConditionalGeneration, sizes.llava()),
    "llava-1.5-13b": (tf.LlavaForConditionalGeneration, tf.LlavaConfig(text_config=LLAMA_13B)),
    "qwen2-vl-7b": (
        tf.Qwen2VLForConditionalGeneration,
        tf.Qwen2VLConfig(text_config=QWEN2_7B, vision_config={"hidden_size": 3584}),
    ),
    "chameleon-7b": (
        tf.ChameleonForConditionalGeneration,
        tf.ChameleonConfig(vocabulary_map={"<image>": 4}),  # whatever the id
    ),
    "qwen3-4b": (tf.Qwen3ForCausalLM, QWEN3_4B),
    "qwen3-8b": (tf.Qwen3ForCausalLM, sizes.qwen3()),
    "llama-3.1-8b": (tf.LlamaForCausalLM, tf.LlamaConfig(**text(128256, 4096, 14336, 32, 32, 8))),
    "vicuna-13b": (tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA_13B | {"vocab_size": 32000})),
    "qwen2.5-32b": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**text(152064, 5120, 27648, 64, 40, 8))),
    "dream-7b": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**QWEN2_7B)),
    "llada-8b": (tf.LlamaForCausalLM, tf.LlamaConfig(**text(126464, 4096, 12288, 32, 32))),
}
DRAFTERS = {  # whole repositories of ours, in half precision
    "msd-llava-1.5-7b": lambda: MSDHead(MSDConfig(32064, 4096, 11008, 32, 32)),
    "msd-llava-1.5-13b": lambda: MSDHead(MSDConfig(32064, 5120, 13824, 40, 40)),
    "msd-qwen2-vl-7b": lambda: MSDHead(MSDConfig(152064, 3584, 18944, 28, 4, qwen=True)),
    "dflash-qwen3-4b": sizes.dflash(QWEN3_4B, sizes.DFLASH_LAYERS, sizes.DFLASH),
    "dflash-qwen3-8b": sizes.dflash(sizes.qwen3(), sizes.DFLASH_LAYERS, sizes.DFLASH),
}


def parameters(make):
    with mapped.WithoutWeights():
        return sum(weight.numel() for weight in make().parameters())


def config_of(name):
    facts = dict(published_models()[name].configs["transformer"])
    assert facts.pop("model") == "GPTConfig"
    return GPTConfig(**facts)


@pytest.mark.parametrize("name", VARS)
def test_var_and_codes_pairs(name):
    made = parameters(lambda: scales.VAR(scales.published(VARS[name])))
    assert FILES[name]["about"] == FLOAT * made


@pytest.mark.parametrize("name", GPTS)
def test_llamagen_and_lanterns_conversions(name):
    config = config_of(name)
    assert FILES[name]["about"] == FLOAT * parameters(lambda: Transformer(config))
    if name.endswith("lantern"):
        head = parameters(lambda: EagleHead(EagleConfig(config)))
        assert FILES[f"{name}-head"]["about"] == FLOAT * head


@pytest.mark.parametrize("name", ["mar-l", "mar-h"])
def test_mar_has_its_weights_and_their_average(name):
    made = parameters(lambda: MAR(MARConfig(**MARS[name.upper()])))
    assert FILES[name]["about"] == 2 * FLOAT * made


@pytest.mark.parametrize("name", MODELS)
def test_repositories_of_transformers(name):
    kind, config = MODELS[name]
    with torch.device("meta"):
        model = kind._from_config(config)
    made = sum(weight.numel() for weight in model.parameters())
    assert published_models()[name].about == HALF * made


@pytest.mark.parametrize("name", DRAFTERS)
def test_repositories_of_drafters(name):
    assert published_models()[name].about == HALF * parameters(DRAFTERS[name])


def test_no_other_size_is_estimated():
    """What nothing computes is unknown, and is said to be."""
    models = published_models()
    assert {name for name, one in models.items() if one.about} == {*MODELS, *DRAFTERS}
    assert all(one.estimate for one in models.values() if one.parts)
    assert models["glm-image"].estimate == 0
