"""What a checkpoint's ``generation_config`` asks of all answers, as generate would apply it."""

import json
import shutil
import warnings

import pytest
import torch
import transformers as tf

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


@pytest.mark.parametrize("method", ["ar", "block"])
@pytest.mark.parametrize(
    "settings",
    [
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [20, 21, 22, 23, 24, 25]},
        {"min_new_tokens": 9, "stop_strings": ["e"]},
        {"forced_eos_token_id": 7},
    ],
)
def test_settings_that_change_scores_apply_as_in_generate(text_folder, settings, method, tmp_path):
    """The checkpoint's own, a call's, and those of a ``GenerationConfig``."""
    shutil.copytree(text_folder, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    own = json.loads(file.read_text())
    plain = specmm.TextPipeline.from_pretrained(tmp_path / "model", dtype=torch.float32)
    file.write_text(json.dumps(own | settings))
    pipe = specmm.TextPipeline.from_pretrained(tmp_path / "model", dtype=torch.float32)
    inputs = pipe.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    ends = {"tokenizer": pipe.tokenizer} if "stop_strings" in settings else {}
    said = pipe.model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False, **ends)
    wanted = said[:, inputs["input_ids"].shape[1] :].tolist()
    config = tf.GenerationConfig(max_new_tokens=LONGEST, **settings)
    by_call = {"stop" if k == "stop_strings" else k: v for k, v in settings.items()}
    for each, options in ((pipe, {}), (plain, by_call), (plain, dict(generation_config=config))):
        out = each(PROMPTS, method=method, **{"max_new_tokens": LONGEST} | options)
        found = [ids.tolist() for ids in out.tokens]
        assert found == [row[: len(ids)] for row, ids in zip(wanted, found, strict=True)]
        assert set(settings) - {"stop_strings"} <= set(out.certificate.settings)


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "block"])
def test_tokens_that_a_function_allows_are_those_of_generate(text_pipe, method):
    """By the row and its text so far."""

    def allowed(row, ids):
        return [5 + row, 9 + int(ids[-1]) % 7, 20 + len(ids) % 5]

    given = dict(max_new_tokens=LONGEST, prefix_allowed_tokens_fn=allowed)
    out = text_pipe(PROMPTS, method=method, **given)
    inputs = text_pipe.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    said = text_pipe.model.generate(**inputs, do_sample=False, **given)
    for found, wanted in zip(out.tokens, said[:, inputs["input_ids"].shape[1] :], strict=True):
        assert found.tolist() == wanted[: len(found)].tolist()


def test_what_is_sampled_by_them_is_what_generate_samples(text_pipe):
    """The distributions after three prompts, by what either draws 3,000 times."""
    for options in (dict(min_p=0.2), dict(typical_p=0.4), dict(epsilon_cutoff=0.05)):
        prompt = PROMPTS[0]
        inputs = text_pipe.tokenizer([prompt] * 3000, return_tensors="pt")
        torch.manual_seed(0)
        theirs = text_pipe.model.generate(
            **inputs, max_new_tokens=1, do_sample=True, temperature=1.0, top_k=0, **options
        )[:, -1]
        ours = text_pipe(
            [prompt] * 3000, max_new_tokens=2, temperature=1.0, seed=0, method="block", **options
        )
        drawn = torch.stack([ids[0] for ids in ours.tokens])
        counts = [torch.bincount(ids, minlength=280) for ids in (theirs, drawn)]
        off = ((counts[0] - counts[1]) ** 2 / (counts[0] + counts[1]).clamp(min=1)).sum()
        free = int((counts[0] + counts[1] > 0).sum()) - 1
        assert float(off) < free + 5 * (2 * free) ** 0.5 + 1


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"seed": 3}, {"generator": torch.Generator()}])
def test_options_of_what_is_sampled_are_named_once_a_call_that_samples_nothing(text_pipe, option):
    name = next(iter(option))
    said = f"{name} changes nothing at temperature 0; give a temperature to sample"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        text_pipe("x", max_new_tokens=1)
        text_pipe("x", max_new_tokens=1, temperature=1.0, **option)
        assert not found
        text_pipe("x", max_new_tokens=1, **option)
        assert [str(one.message) for one in found] == [said]
        list(text_pipe.stream("x", max_new_tokens=1, **option))
        assert [str(one.message) for one in found] == [said, said]


@pytest.mark.parametrize("option", ["--top-p 0.9", "--seed 3"])
def test_the_command_line_says_so_in_one_line(text_folder, option):
    words = ["complete", text_folder, "--prompt", "x", "--max-new-tokens", 1]
    name = option.split()[0]
    said = f"{name} changes nothing at temperature 0; give --temperature 1 to sample"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = run(*words, *option.split())
        assert out.stderr.count("changes nothing") == 1 and said in out.stderr and not found
        assert "changes nothing" not in run(*words, *option.split(), "--temperature", 1).stderr
