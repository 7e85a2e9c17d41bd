"""The recipe of pocket/janus on a handful of pictures: its words, its rows of ids, its tokenizer
and a model that transformers opens, draws with and asks.
"""

from random import Random

import numpy as np
import pytest
import torch
import torch._dynamo.config
from PIL import Image

import specmm
from recipes import captioned, janus
from recipes.training.janus import PROMPT, Sizes, Writer, answer_logits, build_model, picture_logits
from recipes.training.janus_vq import JanusCodes, finished, tokens_of, vq_config
from recipes.wording import asked_for, build_processor, build_tokenizer, chat, prompt
from specmm.core.randomness import seeded
from specmm.hf.pictures.janus import JANUS
from specmm.recipes.pictures import to_float

SIZES = Sizes(dim=32, layers=2, heads=2, inner=32, tower_dim=32, tower_layers=1)
CODES = 16
NAMES = ["red-heart", "guitar", "smiling-cat", "up-arrow", "left-arrow", "owl"]
KINDS = ["heart", "sport", "cat-face", "arrow", "arrow", "animal-bird"]


def some_pictures():
    """Squares of a colour for each thing, in each style."""
    count = len(NAMES)
    styles = np.arange(4 * count) // count
    images = np.full((4 * count, 96, 96, 3), 255, np.uint8)
    for i in range(len(images)):
        images[i, 10 + 8 * styles[i] : 80, 10:50] = (40 * (i % count), 60 * styles[i], 90)
    return captioned.Captioned(
        images,
        images[:, :88, :88],
        np.array([captioned.KINDS.index(kind) for kind in KINDS] * 4),
        styles,
        NAMES * 4,
        [["red", "love"], [], ["cat"], [], [], ["bird"]] * 4,
    )


@pytest.fixture(scope="module")
def pictures():
    return some_pictures()


@pytest.fixture(scope="module")
def words(pictures):
    return build_tokenizer(pictures)


@pytest.fixture(scope="module")
def model(words):
    with seeded(0):
        codes = JanusCodes(vq_config(CODES, janus.TOKENS, 1))
        codes.quantize.embedding.weight.data.normal_()
    made = build_model(SIZES, finished(codes), words, 0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 2 and "vqmodel" not in name:
                parameter.normal_(0, 0.6)
    return made.eval()


def test_every_prompt_is_in_words_that_the_tokenizer_has(pictures, words):
    random = Random(0)
    asked = [prompt(pictures, i % len(pictures), random) for i in range(400)]
    asked += [text for i in range(24) for turn in chat(pictures, i, random) for text in turn]
    for text in asked:
        assert words.unk_token_id not in words(text)["input_ids"], text
    assert len(set(asked)) > 200
    assert words.unk_token_id in words("a submarine")["input_ids"]
    assert asked_for("owl", "flat") == "an owl, flat"


def test_views_mirror_only_what_stays_the_same(pictures):
    views = pictures.views(4, 0)
    arrow = NAMES.index("left-arrow")
    assert np.array_equal(views[:, 0], pictures.images)
    assert np.array_equal(views[0, 1], pictures.images[0, :, ::-1])
    assert np.array_equal(views[arrow, 1], pictures.images[arrow])
    assert not np.array_equal(views[0, 2], views[0, 0])


def test_rows_are_those_that_the_model_is_drawn_from(pictures, words, model):
    """The prompt, and what guidance leads away from."""
    writer = Writer(words)
    text = "a smiling cat, glossy"
    ids = JANUS.ids(model, words, text, JANUS.layout(model, None))
    assert writer.prompt(text) == ids
    assert writer.emptied(ids) == JANUS.away(model, words, ids)
    codes = torch.arange(144)[None] % CODES
    row = writer.drawing([text], codes, None)
    begin = int(row.begins[0])
    assert row.ids[0, :begin].tolist() == ids
    assert torch.equal(row.ids[0, begin : begin + 144], codes[0] + len(words))
    long = writer.drawing(["owl " * 40], codes, None)
    assert int(long.begins[0]) == PROMPT and long.ids[0, PROMPT - 1] == words.boi_token_id


def test_a_chat_is_that_of_the_processor(pictures, words):
    processor = build_processor(words, 144)
    turns = chat(pictures, 0, Random(0))
    content = [{"type": "image"}, {"type": "text", "text": turns[0][0]}]
    said = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(said, add_generation_prompt=True)
    image = Image.fromarray(pictures.images[0])
    found = processor(text=[text], images=[image], add_special_tokens=False, return_tensors="pt")
    pixels = to_float(torch.from_numpy(pictures.images[:1]))
    talk = Writer(words).talk([turns], pixels, 144)
    asked = found["input_ids"][0]
    assert torch.equal(talk.ids[0, : len(asked)], asked)
    torch.testing.assert_close(found["pixel_values"], pixels, atol=1e-4, rtol=0)
    answer = words(turns[0][1])["input_ids"]
    labels = talk.labels[0, len(asked) - 1 :][: len(answer)]
    assert labels.tolist() == answer and int((talk.labels[0] >= 0).sum()) < 20


@torch.no_grad()
def test_logits_are_the_models_own(pictures, words, model, tmp_path):
    """Of a picture drawn without guidance, and of an answer, from an opened folder."""
    model.save_pretrained(tmp_path)
    build_processor(words, 144).save_pretrained(tmp_path)
    pipe = specmm.ImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(["a red heart, flat"], temperature=0, cfg=1.0, output_type="latent").tokens
    row = Writer(words).drawing(["a red heart, flat"], drawn, None)
    assert len(drawn.unique()) > 2
    assert torch.equal(picture_logits(model, row.ids, row.begins, 144).argmax(-1), drawn)

    pixels = to_float(torch.from_numpy(pictures.images[:2]))
    talk = Writer(words).talk([chat(pictures, i, Random(i)) for i in range(2)], pixels, 144)
    found = answer_logits(model, talk.ids, talk.pixels, 147)
    whole = model(input_ids=talk.ids, pixel_values=pixels).logits
    torch.testing.assert_close(found, whole[:, 147:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_finished_tokenizer_chooses_the_codes_it_was_trained_with(pictures):
    with seeded(1):
        codes = JanusCodes(vq_config(CODES, janus.TOKENS, 1))
        codes.quantize.embedding.weight.data.normal_()
    x = to_float(torch.from_numpy(pictures.images[:3]))
    quantized = codes.encode(x)
    made = codes.decode(quantized.codes)
    vq = finished(codes)
    tokens = tokens_of(vq, x)
    assert torch.equal(tokens, quantized.indices.flatten(1)) and len(tokens.unique()) > 2
    torch.testing.assert_close(vq.decode(tokens), made, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch._dynamo.config.patch(disable=True)
def test_the_whole_recipe(pictures, tmp_path, monkeypatch):
    """Two steps of each training; the folder opens, draws and answers."""
    monkeypatch.setattr(janus, "captioned", lambda data, split: pictures)
    rest = dict(data=tmp_path, seed=0, batch=2, lr=1e-3)
    janus.tokenizer(views=2, steps=2, codes=CODES, out=tmp_path / "vq", **rest)
    sizes = dict(vars(SIZES), tower_steps=2, noise=0.1, cfg=2.0, temperature=0.7)
    out = tmp_path / "janus"
    janus.janus(tokenizer=tmp_path / "vq", views=2, steps=9, out=out, **rest, **sizes)
    pipe = specmm.ImagePipeline.from_pretrained(out / "model", method="sjd")
    assert (pipe.settings.cfg, pipe.settings.temperature) == (2.0, 0.7)
    assert pipe("a red heart, flat", output_type="uint8").images.shape == (1, 96, 96, 3)
    vqa = specmm.VQAPipeline.from_pretrained(out / "model")
    shown = Image.fromarray(pictures.images[0])
    assert vqa([shown], ["what is this?"], max_new_tokens=3).answers
