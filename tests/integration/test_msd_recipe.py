"""An MSD drafter learns from conversations of one's own: lines of JSON, read through the model's
processor.
"""

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
from specmm.chats.tokens import ChatReader
from specmm.hf.drafters.files import read_acceptance
from specmm.recipes.recipe import train
from specmm.vlm.loading import load_processor
from tests.tiny.chats import one_turn, picture_chats, undrafted

LLAVA = zoo.POCKET / "llava"


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return picture_chats(tmp_path_factory.mktemp("conversations"))


def test_a_line_is_what_the_models_own_training_made_of_it(lines):
    processor, file = load_processor(LLAVA), lines.parent / "a.png"
    encoder = Encoder(processor.tokenizer, 64)
    reader = ChatReader(processor, [processor.tokenizer.eos_token_id], 1024)
    for image in (str(file), None):
        chat = one_turn("Is it a star?", "yes", image)
        prompt, answers = reader.read([chat])
        pixels = np.asarray(Image.open(image)) if image else None
        wanted = encoder.chat([Turn("Is it a star?", "yes", "is there")], pixels)
        assert prompt.input_ids[0].tolist() == wanted.input_ids.tolist()
        assert answers[0].tolist() == wanted.answer_mask.tolist()
        assert reader.check(chat) == len(wanted.input_ids)
        assert prompt.vision.keys() == ({"pixel_values"} if image else set())
        if image:
            torch.testing.assert_close(prompt.vision["pixel_values"][0], wanted.pixel_values)


def test_the_recipe(lines, tmp_path):
    model = undrafted(LLAVA, tmp_path / "model")
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
    model = undrafted(LLAVA, tmp_path / "model")
    options = dict(model=model, steps=2, batch=2, width=32, scenes=1, ramp=1, out=tmp_path / "run")
    train("scenes-msd", **options)
    measured = read_acceptance(model / "drafters" / "msd")
    assert measured.keys() == {0.0, 1.0}
