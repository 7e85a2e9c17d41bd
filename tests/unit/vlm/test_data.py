import json
from collections import Counter
from itertools import islice
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from recipes.scenes.easy import Example, load_easy, read_easy
from recipes.scenes.kinds import KINDS
from recipes.scenes.opinions import weighed
from recipes.scenes.packing import Encoder, stack, to_pixels
from recipes.scenes.patches import NAMES, example_labels, labelled, scene_labels
from recipes.scenes.questions import Turn
from recipes.scenes.scenes import R, compose
from recipes.scenes.sprites import Sprite, Sprites
from recipes.scenes.stream import World, learn_tokenizer
from recipes.scenes.tokenizer import build_processor

TURNS = [Turn("What is it?", "a cat", "what"), Turn("Where is the cat?", "on the left", "where")]


@pytest.fixture(scope="module")
def world():
    square = np.full((64, 64, 4), 255, np.uint8)
    sprites = Sprites(
        tuple(Sprite(k.name, colour, square) for k in KINDS for colour in k.icons.values())
    )
    picture = np.full((R, R, 3), 250, np.uint8)
    picture[12:36, 12:36] = (0, 0, 255)
    turns = (
        Turn("what is the blue shape?", "rectangle", "easy shape"),
        Turn("what color is it?", "blue", "easy colour"),
    )
    return World(sprites, [Example(picture, turns)])


@pytest.fixture(scope="module")
def tokenizer(world):
    return learn_tokenizer(world)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer, image_tokens=4)


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("Where is the octopus?", "Zürich 東京 🙂, tab\tand\nline"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_words_of_the_world_are_one_token(tokenizer):
    assert len(tokenizer("Where is the octopus?").input_ids) == 5
    assert len(tokenizer) <= 768


def test_a_saved_processor_prepares_what_training_saw(tokenizer, tmp_path):
    build_processor(tokenizer, 64, 8).save_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": TURNS[0].question}]
    chat = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": TURNS[0].answer}]},
        {"role": "user", "content": TURNS[1].question},
        {"role": "assistant", "content": TURNS[1].answer},
    ]
    inputs = processor(
        images=Image.fromarray(image), text=processor.apply_chat_template(chat), return_tensors="pt"
    )
    sample = Encoder(processor.tokenizer, 64).chat(TURNS, image)
    assert inputs.input_ids[0].tolist() == sample.input_ids.tolist()
    torch.testing.assert_close(inputs.pixel_values[0], sample.pixel_values)
    prompt = processor.apply_chat_template(chat[:1], add_generation_prompt=True)
    asked = processor(images=image, text=prompt).input_ids[0]
    assert asked == sample.input_ids[: len(asked)].tolist()
    assert sample.answer_mask[len(asked)]
    assert not sample.answer_mask[: len(asked)].any()


def test_pictures_of_any_size_are_prepared(tokenizer):
    processor = build_processor(tokenizer, 64, 8)
    prepared = processor(
        images=Image.new("RGB", (300, 200)), text="<image>What is it?", return_tensors="pt"
    )
    assert prepared.pixel_values.shape == (1, 3, 64, 64)
    assert (prepared.input_ids == tokenizer.convert_tokens_to_ids("<image>")).sum() == 64


def test_side_by_side_segments_see_the_picture_and_themselves(encoder):
    image = np.zeros((64, 64, 3), np.uint8)
    row = encoder.side_by_side(TURNS, image, 40)
    batch = stack([row])
    mask, segments = batch.attention_mask[0, 0], row.segments
    second = int((segments == 2).nonzero()[0])
    assert mask[second, :6].all()  # start, user, four image tokens
    assert not mask[second, 6:second].any()
    assert mask[second, second]
    assert not mask[second, second + 1 :].any()
    assert row.position_ids[second] == 6


def test_a_side_by_side_turn_equals_the_chat_of_it_alone(encoder):
    image = np.zeros((64, 64, 3), np.uint8)
    row, alone = encoder.side_by_side(TURNS, image, 40), encoder.chat(TURNS[1:], image)
    own = (row.segments == 0) | (row.segments == 2)
    assert row.input_ids[own].tolist() == alone.input_ids.tolist()
    assert row.position_ids[own].tolist() == alone.position_ids.tolist()
    assert row.answer_mask[own].tolist() == alone.answer_mask.tolist()


def test_labels_are_the_next_tokens_of_answers(encoder):
    batch = stack([encoder.chat(TURNS)])
    asked = batch.labels[0][batch.labels[0] >= 0].tolist()
    assert encoder.tokenizer.decode(asked) == "a cat</s> on the left</s>"


def test_turns_that_do_not_fit_are_left_out_and_rows_padded(encoder):
    row = encoder.chat(TURNS, length=12)
    assert len(row.input_ids) == 12
    assert encoder.tokenizer.decode(row.input_ids[row.answer_mask].tolist()) == "a cat</s>"


def test_rows_and_conversations_repeat_with_their_seed(world, encoder):
    a, b = (world.row(encoder, Random(3), 100) for _ in range(2))
    assert torch.equal(a.input_ids, b.input_ids)
    talks = [
        list(islice(world.conversations(encoder, Random(3), visual=0.5), 20)) for _ in range(2)
    ]
    for x, y in zip(*talks, strict=True):
        assert torch.equal(x.input_ids, y.input_ids)
        assert x.answer_mask.any()
    assert {sample.pixel_values is None for sample in talks[0]} == {True, False}


def test_patches_are_labelled_by_what_they_show(world):
    scene = compose(world.sprites, Random(0))
    labels = scene_labels(scene, 12)
    assert set(labels[:, 0]) == {0, *(NAMES.index(thing.kind) for thing in scene.things)}
    thing = scene.things[0]
    centre = (15, 48, 80)[thing.place // 3] // 12 * 8 + (15, 48, 80)[thing.place % 3] // 12
    assert labels[centre, 0] == NAMES.index(thing.kind)
    assert labels[centre, 3] == thing.place


def test_patches_of_easy_pictures_are_labelled_from_their_answers(world):
    labels = example_labels(world.easy[0], 12)[:, 0].reshape(8, 8)
    assert (labels[1:3, 1:3] == NAMES.index("rectangle")).all()
    assert (labels > 0).sum() == 4


def test_labelled_batches(world):
    pixels, labels = labelled(world, Random(0), 3, 12)
    assert pixels.shape == (3, 3, R, R)
    assert labels.shape == (3, 64, 4)


def test_opinions_come_before_the_question_and_some_are_wrong():
    asked = Turn("What is it?", "a cat", "what")
    said = Counter[str]()
    for seed in range(200):
        turn = weighed(asked, {"what": ["a cat", "a dog", "a pig"]}, Random(seed))
        *opinions, question = turn.question.split("\n")
        assert question == " What is it?" and turn.answer == "a cat" and 1 <= len(opinions) <= 3
        assert [line[:3] for line in opinions] == [f"{i + 1}. " for i in range(len(opinions))]
        said.update(line[3:] for line in opinions)
    assert set(said) == {"a cat", "a dog", "a pig"} and 0.5 < said["a cat"] / said.total() < 0.75


def test_no_opinions_where_nothing_else_could_be_said():
    for kind, answers in (("what", ["a cat"]), ("what", []), ("describe", ["a", "b"])):
        turn = Turn("What is it?", "a cat", kind)
        assert weighed(turn, {kind: answers}, Random(0)) is turn


def test_some_training_rows_hold_opinions(world, encoder):
    rows = [
        encoder.tokenizer.decode(world.row(encoder, Random(i), 200).input_ids) for i in range(60)
    ]
    assert 1 <= sum("1. " in row for row in rows) < 30


def test_easy_vqa_is_read_by_picture(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64), (9, 8, 7)).save(tmp_path / "images/2.png")
    rows = [["is it red?", "no", 2], ["what is it?", "circle", 2]]
    (tmp_path / "questions.json").write_text(json.dumps(rows))
    (example,) = read_easy(tmp_path)
    wanted = [("no", "easy yes/no"), ("circle", "easy shape")]
    assert [(t.answer, t.kind) for t in example.turns] == wanted
    assert example.image.shape == (R, R, 3) and tuple(example.image[0, 0]) == (9, 8, 7)
    assert to_pixels(example.image)[0, 0, 0] == pytest.approx((9 / 255 - 0.5) / 0.5)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("recipes.scenes.easy.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install easy-vqa"):
        load_easy()
