"""A model is asked about each kind of prompt once, and refused where no way agrees."""

import pytest
import torch

import specmm
from benchmarks.models.prompts import prompts_for
from benchmarks.models.table import GAINS, IMAGE_TEXT, types
from benchmarks.models.tiny import build, tiny_config
from specmm.core.processors import Processor
from specmm.hf.models import probe
from specmm.hf.models.families import Family, Way
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt

ASKED = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def made():
    """A tiny model of a type, and prompts for it."""

    def of(name):
        line = next(line for line in types() if line.key == (IMAGE_TEXT, name))
        model = build(line.architecture, tiny_config(name), 0, GAINS[0])
        return model, prompts_for(model)

    return of


def ours(model, inputs):
    return model.generate(**inputs, **ASKED, custom_generate=specmm.custom_generate(method="ar"))


def test_each_kind_of_prompt_is_asked_about_once(made, monkeypatch):
    model, prompts = made("gemma3")
    asked = []
    inner = probe._generated
    monkeypatch.setattr(probe, "_generated", lambda *a: asked.append(a[1].kind) or inner(*a))
    for name in ("text", "picture", "picture", "pictures", "batch", "batch"):
        assert torch.equal(ours(model, prompts[name]), model.generate(**prompts[name], **ASKED))
    assert len(asked) == len(set(asked)) < 6


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda m: m.setattr(VLMPrompt, "types", {}), id="types of tokens forgotten"),
        pytest.param(
            lambda m: m.setattr(Family, "spread", lambda self, positions: positions + 1),
            id="positions off by one",
        ),
    ],
)
def test_what_is_read_otherwise_is_refused(made, monkeypatch, fault):
    """With the ways that let the model prepare its prompts itself taken away."""
    model, prompts = made("gemma3")
    monkeypatch.setattr(Family, "ways", (Way(),))
    wanted = model.generate(**prompts["picture"], **ASKED)
    assert torch.equal(ours(model, prompts["picture"]), wanted)
    model, _ = made("gemma3")  # nothing is known of it
    fault(monkeypatch)
    with pytest.raises(ValueError, match=r"'gemma3' cannot be accelerated here.* differ from"):
        ours(model, prompts["picture"])


def test_a_model_whose_generated_tokens_have_positions_of_their_own_is_refused(made):
    """As GLM-Image's, which lie in a grid."""
    model, prompts = made("qwen2_vl")

    class Jumping(type(model)):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            given = super().prepare_inputs_for_generation(*args, **kwargs)
            if not kwargs.get("is_first_iteration"):
                given["position_ids"] = 2 * given["position_ids"]
            return given

    model.__class__ = Jumping
    with pytest.raises(ValueError, match=r"cannot be accelerated here with .* differ from its own"):
        ours(model, prompts["picture"])


def test_a_prompt_that_the_model_cannot_read_says_nothing_of_others(made):
    model, prompts = made("llava")
    target = VLMTarget(model, Processor())
    bad = dict(prompts["picture"])
    bad["input_ids"] = bad["input_ids"].clamp(max=9)  # no placeholders
    with pytest.raises(ValueError, match="the model itself cannot read this prompt"):
        target.prefill(VLMPrompt(bad, 4), 2)
    wanted = model.generate(**prompts["picture"], **ASKED)
    assert torch.equal(ours(model, prompts["picture"]), wanted)


def test_encoder_decoders_are_refused_by_name(made):
    model, prompts = made("florence2")
    with pytest.raises(ValueError, match="'florence2' cannot be accelerated here: it is an"):
        ours(model, prompts["picture"])


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_decoders_that_read_tokens_themselves_are_given_them(made, name):
    model, _ = made(name)
    assert all(way.whole for way in Family.of(model).ways)
    assert VLMTarget(model, Processor()).way.whole


def test_rows_of_layers_that_see_pictures_apart_do_not_begin_anew(made):
    model, _ = made("mllama")
    assert Family.of(model).reads_pictures_apart
    assert not Family.of(made("gemma4")[0]).reads_pictures_apart
