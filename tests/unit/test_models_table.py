"""The table of model types: configs shrunk, prompts with pictures, and answers told apart."""

import re

import pytest
import torch

from benchmarks.models import check
from benchmarks.models.check import CRASH, EQUAL, REFUSED, TIED, WRONG, Answer, Outcome
from benchmarks.models.prompts import PICTURE, PICTURES, Prompts, text_prompts
from benchmarks.models.table import CAUSAL, GAINS, SERVED, Line, ask, enter
from benchmarks.models.tiny import (
    ORDINARY,
    VOCABULARY,
    NotBuildable,
    build,
    layers_of_each_kind,
    tiny_config,
)
from specmm import methods


@pytest.fixture(scope="module")
def model():
    return build("LlamaForCausalLM", tiny_config("llama"), 0, GAINS[0])


@pytest.fixture(scope="module")
def prompt():
    return text_prompts()["batch"]


@pytest.fixture(scope="module")
def own(model, prompt):
    return check.own_answer(model, prompt)


def compared(model, prompt, own, answers=None, error=None, monkeypatch=None):
    """What ``compare`` says of a generate that gives ``answers`` or raises."""

    def generate(**_):
        if error is not None:
            raise error
        return torch.cat([prompt["input_ids"], answers], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    return check.compare(model, prompt, own, methods.AR(), model)


def test_other_tokens_are_wrong(model, prompt, own, monkeypatch):
    answers = own.tokens.clone()
    assert compared(model, prompt, own, answers, None, monkeypatch)[0] == EQUAL
    answers[1, 3] = (answers[1, 3] + 1) % VOCABULARY
    found, why = compared(model, prompt, own, answers, None, monkeypatch)
    assert found == WRONG
    assert "token 3 of row 1" in why
    assert compared(model, prompt, own, own.tokens[:, :5], None, monkeypatch)[0] == WRONG


def test_a_tie_is_no_difference(model, prompt, own, monkeypatch):
    answers = own.tokens.clone()
    answers[1, 3] = (answers[1, 3] + 1) % VOCABULARY
    margins = own.margins.clone()
    margins[1, 3] = check.TIE / 2
    tied = Answer(own.tokens, own.length, margins)
    assert compared(model, prompt, tied, answers, None, monkeypatch)[0] == TIED


def test_only_a_sentence_refuses(model, prompt, own, monkeypatch):
    one = ValueError("expected this, got that; do this")
    assert compared(model, prompt, own, None, one, monkeypatch)[0] == REFUSED
    many = ValueError("one\ntwo")
    assert compared(model, prompt, own, None, many, monkeypatch)[0] == CRASH
    other = RuntimeError("sizes")
    assert compared(model, prompt, own, None, other, monkeypatch) == (CRASH, "RuntimeError: sizes")


def test_dull_answers_prove_nothing_but_may_be_refused(prompt, monkeypatch):
    """A refusal says the same of any weights."""
    same = build("LlamaForCausalLM", tiny_config("llama"), 0, GAINS[0])
    same.lm_head.weight.data.zero_()
    with pytest.raises(check.Dull):
        list(check.outcomes(same, {"text": prompt}))
    monkeypatch.setattr(check, "compare", lambda *_: (REFUSED, "why"))
    found = list(check.outcomes(same, {"text": prompt}))
    assert {outcome.found for outcome in found} == {REFUSED}


@pytest.mark.parametrize(
    ("kind", "config", "shown", "shut"),
    [
        ("Llava", "llava", PICTURES, r"projector\.linear_2\.weight"),
        ("Mllama", "mllama", PICTURE, "cross_attn.*gate"),  # zero at first: none would be seen
        ("Kosmos2_5", "kosmos-2.5", PICTURE, ""),  # a flat patch begins with its row and column
    ],
)
def test_a_picture_without_effect_proves_nothing(kind, config, shown, shut):
    seeing = build(f"{kind}ForConditionalGeneration", tiny_config(config), 0, GAINS[0])
    inputs = Prompts(seeing).of([shown])
    check.check_pictures(seeing, inputs)
    for name, parameter in seeing.named_parameters():
        if shut and re.search(shut, name):
            parameter.data.zero_()
    if shut:
        with pytest.raises(check.Dull, match="picture"):
            check.check_pictures(seeing, inputs)


def test_the_worst_setting_is_the_type_s():
    line = Line(CAUSAL, "llama", "LlamaForCausalLM")
    equal = Outcome("text", "ar", EQUAL)
    enter(line, [equal, Outcome("batch", "ar", REFUSED, "too long")])
    assert (line.status, line.text, line.batch) == (REFUSED, EQUAL, REFUSED)
    assert line.reason == "batch, ar: too long"
    enter(line, [equal, Outcome("batch", "ar", REFUSED), Outcome("batch", "x", CRASH)])
    assert line.status == CRASH
    enter(line, [equal, Outcome("batch", "ar", WRONG), Outcome("batch", "x", CRASH)])
    assert line.status == WRONG
    enter(line, [equal])
    assert (line.status, line.equal, line.settings) == (SERVED, 1, 1)


def test_a_class_that_cannot_be_made_has_a_reason():
    line = ask(Line(CAUSAL, "llama", "NoSuchClass"))
    assert "NoSuchClass" in line.reason
    with pytest.raises(NotBuildable, match="robot"):
        tiny_config("pi0")


def test_every_kind_of_layer_stays():
    kinds = {"layer_types": list("aaabaaab"), "mlp": list("ddssssss"), "order": list(range(8))}
    found = layers_of_each_kind(kinds, 8)
    assert found == {"layer_types": ["a", "a", "b"], "mlp": ["d", "s", "s"], "order": [0, 1, 2]}
    assert layers_of_each_kind({"layer_types": ["a"] * 4}, 4) == {"layer_types": ["a", "a"]}
    assert tiny_config("qwen3_next").layer_types == ["linear_attention", "full_attention"]


def test_sizes_and_ids_fit():
    config = tiny_config("qwen2_5_vl")
    ids = {config.image_token_id, config.video_token_id, config.vision_start_token_id}
    assert len(ids) == 3
    assert min(ids) >= ORDINARY
    assert max(ids) < VOCABULARY
    text = config.text_config
    assert sum(text.rope_parameters["mrope_section"]) * 2 == text.hidden_size // 4
    assert config.vision_config.out_hidden_size == text.hidden_size


def test_a_model_never_says_placeholders(model, own):
    assert int(own.tokens.max()) < ORDINARY
    assert not bool(model.lm_head.weight[ORDINARY:].any())


def test_drafts_are_kept_and_rejected(model, prompt, own):
    """Or trees of drafts would not be tried: of two drafts for each token one is right."""
    drafter = check.bigrams(model, prompt["input_ids"], own.tokens)
    row = torch.cat([prompt["input_ids"], own.tokens], dim=1)[0]
    drafts = drafter(row[None]).logits[0].topk(2).indices
    first = float((drafts[:-1, 0] == row[1:]).float().mean())
    either = float((drafts[:-1] == row[1:, None]).any(-1).float().mean())
    assert 0.2 < first < 0.9
    assert either > first


def test_chains_are_tried_where_trees_are_refused(model, prompt, monkeypatch):
    plain = check.compare

    def no_trees(model, inputs, own, method, drafter):
        if method in check.METHODS[2:]:
            return REFUSED, "drafts for it must be chains, got a tree"
        return plain(model, inputs, own, method, drafter)

    monkeypatch.setattr(check, "compare", no_trees)
    found = list(check.outcomes(model, {"x": prompt}))
    assert {outcome.found for outcome in found} == {EQUAL}
    assert found[-1].method == "text-draft of chains"
    assert "chains" in found[-1].reason
