"""What a checkpoint's ``generation_config`` asks of all answers, as generate would apply it."""

import json
import logging
import shutil

import pytest
import torch

import specmm
from tests.commands import run

PROMPTS = ["def add(a, b):\n", "x", "    return a + b + a"]
LONGEST = 12


@pytest.fixture(scope="module")
def penalised(text_folder, tmp_path_factory):
    """A copy of the target, published with a repetition penalty."""
    folder = tmp_path_factory.mktemp("penalised") / "model"
    shutil.copytree(text_folder, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"repetition_penalty": 1.6, "no_repeat_ngram_size": 9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def generated(pipe, prompt):
    """What generate answers to ``prompt`` greedily, by the checkpoint's own settings."""
    inputs = pipe.tokenizer(prompt, return_tensors="pt")
    said = pipe.model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    return said[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "block"])
def test_the_checkpoints_penalty_applies_as_in_generate(penalised, text_pipe, method):
    pipe = specmm.TextPipeline.from_pretrained(penalised, dtype=torch.float32)
    out = pipe(PROMPTS, method=method, max_new_tokens=LONGEST)
    assert [ids.tolist() for ids in out.tokens] == [generated(pipe, text) for text in PROMPTS]
    assert out.certificate.settings["repetition_penalty"] == 1.6
    streamed = map("".join, zip(*pipe.stream(PROMPTS, max_new_tokens=LONGEST), strict=True))
    assert list(streamed) == out.texts
    off = pipe(PROMPTS, method=method, max_new_tokens=LONGEST, repetition_penalty=1.0)
    assert off.texts == text_pipe(PROMPTS, max_new_tokens=LONGEST).texts
    assert off.texts != out.texts and "repetition_penalty" not in off.certificate.settings


def test_questions_take_the_checkpoints_penalty():
    pipe = specmm.VQAPipeline.from_pretrained("pocket/llava", dtype=torch.float32)
    asked = dict(images=None, questions="Write something.", max_new_tokens=40)
    plain, wanted = pipe(**asked), pipe(**asked, repetition_penalty=1.5)
    pipe.model.generation_config.repetition_penalty = 1.5
    found = pipe(**asked, method="msd")
    assert found.answers == wanted.answers != plain.answers
    assert found.certificate.settings == wanted.certificate.settings


def test_the_command_says_which_penalty_it_took(penalised):
    command = ["complete", str(penalised), "-p", "x", "--max-new-tokens", "3", "--json"]
    for given, wanted in (([], 1.6), (["--repetition-penalty", "1"], 1.0)):
        record = json.loads(run(*command, *given).stdout)
        assert record["sampling"]["repetition_penalty"] == wanted


def test_settings_that_pipelines_do_not_apply_are_told(penalised, text_folder, caplog):
    with caplog.at_level(logging.WARNING, "specmm"):
        specmm.TextPipeline.from_pretrained(text_folder)
        assert not caplog.messages
        specmm.TextPipeline.from_pretrained(penalised)
    (said,) = caplog.messages
    assert "asks for no_repeat_ngram_size in its generation_config" in said
