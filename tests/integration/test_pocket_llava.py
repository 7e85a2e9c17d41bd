"""The shipped vision-language model: it loads as transformers has it, sees, and keeps the methods'
promises.
"""

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor

from specmm import methods, zoo
from specmm.vlm.pipeline import VQAPipeline
from tests.commands import as_json, succeed

POCKET = zoo.POCKET / "llava"
DESCRIBE = "Describe the picture."


@pytest.fixture(scope="module")
def pipe():
    return VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def rectangle():
    picture = Image.new("RGB", (64, 64), (236, 236, 236))
    ImageDraw.Draw(picture).rectangle((14, 20, 46, 44), fill=(232, 24, 30))
    return picture


def test_it_sees(pipe, rectangle):
    asked = [
        "what shape is in the image?",
        "what is the color of the shape?",
        "is there a red shape?",
    ]
    assert pipe([rectangle] * 3, asked).answers == ["rectangle", "red", "yes"]


@torch.no_grad()
def test_plain_and_drafted_answers_are_those_of_transformers(pipe, rectangle):
    model = AutoModelForImageTextToText.from_pretrained(POCKET, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(POCKET)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": DESCRIBE}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(
        images=[rectangle], text=prompt, return_tensors="pt", add_special_tokens=False
    )
    [said] = model.generate(**inputs, do_sample=False, max_new_tokens=48)
    said = said[inputs.input_ids.shape[1] :]
    sampled = methods.MSD(sampled=True, tree=(2, 1, 1, 1))
    for method in (
        "ar",
        "msd",
        "text-draft",
        "vlm-draft",
        "prompt-lookup",
        "suffix",
        "recycle",
        sampled,
    ):
        out = pipe(rectangle, DESCRIBE, method=method, max_new_tokens=48)
        assert out.tokens[0].tolist() == said.tolist(), method
        assert out.certificate.kind == "exact"


def test_msd_drafts_well_and_the_picture_helps(pipe, rectangle):
    taus = {
        m: pipe(rectangle, DESCRIBE, method=m, max_new_tokens=48).stats.tau
        for m in ("msd", "text-draft")
    }
    assert taus["msd"] > 2 and taus["msd"] > taus["text-draft"]


@pytest.mark.slow
def test_auto_and_the_command_line(rectangle, tmp_path):
    rectangle.save(tmp_path / "red.png")
    found = as_json("ask pocket/llava --method auto -q", DESCRIBE, tmp_path / "red.png")
    assert found["outputs"][0] and found["method"].startswith("auto")
    assert found["certificate"]["kind"] == "exact"


def test_the_experts_are_heard(rectangle, tmp_path):
    rectangle.save(tmp_path / "red.png")
    asked = ("what shape is in the image?", tmp_path / "red.png")
    found = as_json("ask pocket/llava --method verdict -q", *asked)
    assert found["outputs"] == ["rectangle"] and found["certificate"]["kind"] == "heuristic"
    said = succeed("ask pocket/llava --method verdict -q", *asked)
    assert said.stderr.count("read as number") >= 1
