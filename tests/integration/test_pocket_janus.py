"""The Janus of ``specmm train janus``, where it is in the zoo: transformers opens it unchanged,
every method draws its own tokens, and it draws and answers what is asked.
"""

import pytest
import torch
import transformers as tf
from PIL import Image

import specmm
from specmm import zoo
from tests.commands import run, succeed

NAME = "pocket/janus"
FOLDER = zoo.POCKET / "janus"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="is trained: docs/janus.md")
PROMPTS = ["a red heart, flat", "smiling cat, glossy"]
COLOURS = {"red": 0, "green": 1, "blue": 2}  # and their channels


@pytest.fixture(scope="module")
def pipe():
    made = specmm.ImagePipeline.from_pretrained(NAME, torch_dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def hearts(pipe):
    """One of each colour [3, H, W, 3] uint8."""
    seeds = [torch.Generator().manual_seed(i) for i in range(3)]
    texts = [f"a {colour} heart, flat" for colour in COLOURS]
    return pipe(texts, generator=seeds, output_type="uint8").images


def test_greedy_pictures_are_those_of_generate(pipe):
    """By every method that draws without a drafter, alone and in a ragged batch."""
    model = tf.JanusForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    processor = tf.AutoProcessor.from_pretrained(FOLDER)
    turns = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in PROMPTS]
    asked = [processor.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]
    inputs = processor(text=asked, generation_mode="image", padding=True, return_tensors="pt")
    wanted = model.generate(
        **inputs, generation_mode="image", do_sample=False, guidance_scale=pipe.settings.cfg
    )
    given = dict(temperature=0, output_type="latent")
    for method in ("ar", "sjd", "prompt-lookup"):
        assert torch.equal(pipe(PROMPTS, method=method, **given).tokens, wanted), method
    assert torch.equal(pipe(PROMPTS[1], **given).tokens, wanted[1:])


def test_it_draws_the_colour_that_is_asked_for(hearts):
    for picture, channel in zip(hearts, COLOURS.values(), strict=True):
        pixels = torch.tensor(picture).float().flatten(0, 1)
        inked = pixels[pixels.amin(-1) < 200]
        assert len(inked) > 1000
        assert int(inked.mean(0).argmax()) == channel


def test_it_says_what_it_drew(pipe):
    """A word of it, for two of three."""
    vqa = specmm.VQAPipeline.from_pretrained(NAME, torch_dtype=torch.float32)
    things = {
        "grinning face, glossy": "face",
        "green apple, noto": "apple",
        "police officer, twemoji": "officer",
    }
    seeds = [torch.Generator().manual_seed(i) for i in range(3)]
    drawn = pipe(list(things), generator=seeds, output_type="uint8").images
    shown = [Image.fromarray(picture) for picture in drawn]
    said = vqa(shown, ["what is this?"] * 3, max_new_tokens=8, temperature=0).answers
    right = [word in answer for word, answer in zip(things.values(), said, strict=True)]
    assert sum(right) >= 2, said


def test_the_command_line_draws_and_lists_it(tmp_path):
    succeed(f"generate {NAME} --seed 0 --prompt", PROMPTS[0], "--out", tmp_path)
    [file] = tmp_path.glob("*.png")
    assert Image.open(file).size == (96, 96)
    assert NAME in run("zoo").output


def test_it_fits_the_limit_and_has_a_card():
    assert (FOLDER / "model.safetensors").stat().st_size <= 16e6
    card = zoo.card(NAME)
    told = {"description", "data", "licence", "seed", "steps", "loss", "command", "metrics"}
    assert told <= card.keys()
    assert (FOLDER / "README.md").is_file() and (FOLDER / "sheet.png").is_file()
