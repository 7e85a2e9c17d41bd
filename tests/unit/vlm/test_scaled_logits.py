"""Classes that leave, scale or cap the logits of their language model: the distribution at T = 1 is
generate's own, with pictures and without.
"""

import pytest
import torch
import transformers as tf

import specmm
from specmm.hf.prompts.path_processors import PathProcessor
from tests.tiny import parts
from tests.tiny.parts import CLIP, PIXELS

IMAGE = 59
TEXT = parts.TEXT | dict(vocab_size=60)
TEXTS = {  # numbers far from 1, or caps that are reached
    "granite": dict(logits_scaling=8.0),
    "granitemoe": dict(logits_scaling=8.0, num_local_experts=4, num_experts_per_tok=2),
    "cohere": dict(logit_scale=0.25),
    "cohere2": dict(logit_scale=0.25),
    "gemma2": dict(head_dim=8, final_logit_softcapping=2.0),
}
SIGLIP = PIXELS | dict(model_type="siglip_vision_model")
ALONE = ("aya_vision", "cohere2_vision")  # kinds with a language model of their own, Cohere 2's


def llava(text):
    config = tf.LlavaConfig(
        vision_config=CLIP, text_config=text, image_token_index=IMAGE, image_seq_length=4
    )
    return tf.LlavaForConditionalGeneration(config), {"pixel_values": noise(2, 3, 8, 8)}


def llava_next(text):
    config = tf.LlavaNextConfig(
        vision_config=CLIP, text_config=text, image_token_index=IMAGE, image_grid_pinpoints=[[8, 8]]
    )
    shown = {"pixel_values": noise(2, 2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]] * 2)}
    return tf.LlavaNextForConditionalGeneration(config), shown


def aya_vision(text):
    config = tf.AyaVisionConfig(vision_config=SIGLIP, text_config=text, image_token_index=IMAGE)
    return tf.AyaVisionForConditionalGeneration(config), {"pixel_values": noise(2, 3, 16, 16)}


def cohere2_vision(text):
    config = tf.Cohere2VisionConfig(
        vision_config=SIGLIP, text_config=text, image_token_id=IMAGE, alignment_intermediate_size=24
    )
    return tf.Cohere2VisionForConditionalGeneration(config), {"pixel_values": noise(2, 3, 16, 16)}


KINDS = {f.__name__: f for f in (llava, llava_next, aya_vision, cohere2_vision)}
TOKENS = {"llava": 4, "llava_next": 10, "aya_vision": 4, "cohere2_vision": 4}  # of a picture
PAIRS = [(kind, text) for kind in ("llava", "llava_next") for text in TEXTS]
PAIRS += [(kind, "cohere2") for kind in ALONE]


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=PAIRS, ids="-".join)
def made(request):
    kind, text = request.param
    torch.manual_seed(0)
    model, shown = KINDS[kind](dict(model_type=text, **TEXT, **TEXTS[text]))
    return parts.ending(parts.shaken(model, 0)), shown, TOKENS[kind]


def rows(shown, count):
    """One row with a picture, one with a picture after fewer words, padded at the left."""
    picture = [IMAGE] * (count if shown else 0)
    ids = torch.tensor([[1, 5, 6, 7, *picture, 8, 9], [0, 0, 1, 10, *picture, 11, 12]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), **shown}


@pytest.mark.parametrize("pictures", [True, False], ids=["pictures", "text"])
def test_the_first_token_s_distribution_is_generate_s(made, pictures, monkeypatch):
    model, shown, count = made
    inputs = rows(shown if pictures else {}, count)
    options = dict(max_new_tokens=1, do_sample=True, top_k=0)
    own = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    wanted = own.logits[0].double().softmax(-1)
    seen = []
    probs = PathProcessor.probs
    monkeypatch.setattr(PathProcessor, "probs", lambda *args: seen.append(probs(*args)) or seen[-1])
    model.generate(**inputs, **options, custom_generate=specmm.custom_generate(method="ar"))
    assert distance(seen[0][:, 0], wanted) < 1e-6
    text = model.config.get_text_config()
    factor = getattr(text, "logit_scale", None) or 1 / getattr(text, "logits_scaling", 1.0)
    other = (own.logits[0].double() * factor).softmax(-1)  # what the text model's config says
    assert factor == 1 or distance(other, wanted) > 0.1  # so that a mistake would be seen


def distance(found, wanted):
    return float((found.double() - wanted).abs().sum(-1).amax()) / 2
