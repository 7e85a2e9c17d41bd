"""An MSD drafter learns from conversations of one's own: lines of JSON, read through the model's
processor.
"""

import json
import shutil
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import data
from recipes.scenes.kinds import KINDS
from recipes.scenes.packing import Encoder
from recipes.scenes.questions import Turn
from recipes.scenes.sprites import Sprite, Sprites
from recipes.scenes.stream import World
from specmm import VQAPipeline, zoo
from specmm.hf.drafters.files import read_acceptance
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.conversations import Line, answer_end, conversations, read_lines
from specmm.recipes.recipe import train
from specmm.vlm.loading import load_model, load_processor

LLAVA = zoo.POCKET / "llava"


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Eleven questions about pictures and one about none."""
    folder = tmp_path_factory.mktemp("conversations")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 96, 3), np.uint8)).save(
        folder / "a.png"
    )
    rows = [{"question": f"Is it {i}?", "answer": f"yes, {i}", "image": "a.png"} for i in range(11)]
    rows.append({"question": "What is a fish?", "answer": "an animal"})
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "lines.jsonl"


def test_a_line_is_what_the_models_own_training_made_of_it(lines):
    processor, file = load_processor(LLAVA), lines.parent / "a.png"
    encoder = Encoder(processor.tokenizer, 64)
    end = answer_end(processor, [processor.tokenizer.eos_token_id])
    for image in (str(file), None):
        prompt, answers = read_lines(processor, end, [Line("Is it a star?", "yes", image)])
        pixels = np.asarray(Image.open(image)) if image else None
        wanted = encoder.chat([Turn("Is it a star?", "yes", "is there")], pixels)
        assert prompt.input_ids[0].tolist() == wanted.input_ids.tolist()
        assert answers[0].tolist() == wanted.answer_mask.tolist()
        assert prompt.vision.keys() == ({"pixel_values"} if image else set())
        if image:
            torch.testing.assert_close(prompt.vision["pixel_values"][0], wanted.pixel_values)


def test_held_out_lines_are_not_learnt(lines):
    processor, target = load_processor(LLAVA), VLMTarget(load_model(LLAVA), Processor())
    found = conversations(str(lines), target, processor)
    asked = found.questions(5).texts
    random = Random(0)
    shown = [found.draw(random, i % 2 == 0) for i in range(80)]
    learnt = {line.question for line in shown}
    assert asked == ["Is it 0?", "Is it 10?"]
    assert len(learnt) == 10 and not learnt & set(asked)
    assert all(bool(line.images) == (i % 2 == 0) for i, line in enumerate(shown))


def test_the_recipe(lines, tmp_path):
    model = shutil.copytree(LLAVA, tmp_path / "model", ignore=shutil.ignore_patterns("drafters"))
    found = train(
        "msd", model=model, data=lines, steps=1, batch=2, width=32, scenes=1, out=tmp_path / "run"
    )
    assert found["outputs"] == [str(model / "drafters" / "msd")]
    pipe = VQAPipeline.from_pretrained(model, method="msd", torch_dtype=torch.float32)
    asked = (Image.open(lines.parent / "a.png"), "What is it?")
    wanted = pipe(*asked, method="ar", max_new_tokens=6).answers
    assert pipe(*asked, max_new_tokens=6).answers == wanted


@pytest.mark.slow
def test_the_recipe_on_scenes(tmp_path, monkeypatch):
    """As pocket/llava's drafter was made, with squares in place of emoji."""
    square = np.full((64, 64, 4), 255, np.uint8)
    sprites = Sprites(
        tuple(Sprite(k.name, colour, square) for k in KINDS for colour in k.icons.values())
    )
    monkeypatch.setattr(data, "load_world", lambda folder, split: World(sprites, ()))
    model = shutil.copytree(LLAVA, tmp_path / "model", ignore=shutil.ignore_patterns("drafters"))
    options = dict(model=model, steps=2, batch=2, width=32, scenes=1, ramp=1, out=tmp_path / "run")
    train("scenes-msd", **options)
    measured = read_acceptance(model / "drafters" / "msd")
    assert measured.keys() == {0.0, 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "b"}', "two or more lines with an image or a video, got 0"),
        ('{"question": "a"}', "lines.jsonl:1 must hold question and answer, got"),
        ("{", "lines.jsonl:1 must hold question and answer, got '{'"),
    ],
)
def test_lines_that_are_none(text, message, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        conversations(str(file), None, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "is it?", "answer": "a", "image": 3}, "lines.jsonl:2 must hold question and"),
        (
            {"question": "is it?", "answer": "a"},
            "two or more lines with an image or a video, got 1",
        ),
        ({"question": " ", "answer": "a", "image": "a.png"}, "question must not be empty"),
        ({"question": "is it?", "answer": "a", "image": "lines.jsonl"}, "must be a picture, got"),
        ({"question": "it?" * 999, "answer": "a", "image": "a.png"}, "must fit the 1024 positions"),
    ],
)
def test_lines_that_cannot_train_are_named(lines, line, message, tmp_path):
    model = shutil.copytree(LLAVA, tmp_path / "model", ignore=shutil.ignore_patterns("drafters"))
    shutil.copy(lines.parent / "a.png", tmp_path)
    rows = [dict(question="is it?", answer="yes", image="a.png"), line]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dict(steps=1, batch=2, width=32, scenes=1, ramp=1, out=tmp_path / "run")
    with pytest.raises(ValueError, match=message) as error:
        train("msd", model=model, data=tmp_path / "lines.jsonl", **options)
    assert "\n" not in str(error.value)
