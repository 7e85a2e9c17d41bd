"""Texts and answers whose rows are taken over by waiting samples: each is what it is alone,
whichever method, and mistakes are told.
"""

import pytest
import torch
from PIL import Image
from transformers import TextIteratorStreamer

from specmm import methods
from specmm.programs.batch_invariant import batch_invariant
from tests.cases import some

PROMPTS = ["def add(a, b):\n", "x", "    return a + b + a", "def", "sub(a", "return", "\n\n"]
SEEDS = [3, 4, 5, 6, 7, 8, 9]
FLOWING = [methods.AR(), methods.PromptLookup(), methods.Block(), methods.Block(length=2)]
FLOWING += [methods.DEER(), methods.DEER(tree=7), methods.DEER(recall=1)]
FLOWING += [methods.Suffix(), methods.Recycle()]
FAST = [FLOWING[i] for i in (0, 1, 2, 5, 7, 8)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", some(FLOWING, FAST), ids=str)
def test_texts_are_those_alone(text_pipe, method, temperature):
    assert method.can_refill
    options = dict(method=method, temperature=temperature, max_new_tokens=14, stop=list("dsnr("))
    with batch_invariant():
        continuous = text_pipe(PROMPTS, seed=SEEDS, batch_size=2, **options)
        alone = [
            text_pipe(p, seed=[s], batch_size=1, **options)
            for p, s in zip(PROMPTS, SEEDS, strict=True)
        ]
    assert continuous.texts == [one.texts[0] for one in alone]
    assert all(torch.equal(a, b.tokens[0]) for a, b in zip(continuous.tokens, alone, strict=True))
    assert (
        continuous.stats.rounds
        == sum(one.stats.rounds for one in alone)
        > continuous.stats.batch_rounds
    )
    assert continuous.certificate == alone[0].certificate and continuous.certificate.kind == "exact"
    assert len({len(ids) for ids in continuous.tokens}) > 1


def test_a_diffusion_model_after_deer_is_continuous_too(text_pipe, text_folder):
    model = text_pipe.drafter("specdiff")
    pipe = type(text_pipe)(text_pipe.model, text_pipe.tokenizer, methods.DEER(length=3), model)
    with batch_invariant():
        continuous = pipe(PROMPTS, batch_size=3, max_new_tokens=9, temperature=1.0, seed=SEEDS)
        whole = pipe(PROMPTS, batch_size=7, max_new_tokens=9, temperature=1.0, seed=SEEDS)
    assert continuous.texts == whole.texts


@pytest.mark.parametrize("method", ["diffuspec", "specdiff", "text-draft", "auto"])
def test_methods_whose_rows_wait(text_pipe, method):
    others = "or use one of ar, msd, deer, .*block, prompt-lookup"
    with pytest.raises(ValueError, match=f"batch_size must be 0 for method '{method}'.*{others}"):
        text_pipe(PROMPTS, method=method, batch_size=2)


def test_mistakes(text_pipe):
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        text_pipe(PROMPTS, batch_size=-1)
    with pytest.raises(ValueError, match="batch_size must be 0 for a stream"):
        list(text_pipe.stream(PROMPTS, batch_size=2))
    with pytest.raises(ValueError, match="one for each of the 7 samples, got 2"):
        text_pipe(PROMPTS, batch_size=2, seed=[1, 2])
    with pytest.raises(ValueError, match="a streamer takes one answer at a time, got 7"):
        text_pipe(PROMPTS, batch_size=1, streamer=TextIteratorStreamer(text_pipe.tokenizer))


def test_none_is_lost_when_first_tokens_end_texts(text_pipe):
    place, stop = next(
        (i, s) for i, s in enumerate(text_pipe(PROMPTS, max_new_tokens=1).texts) if s
    )
    prompts = [PROMPTS[place], *PROMPTS]
    continuous = text_pipe(prompts, max_new_tokens=6, batch_size=1, stop=stop)
    assert continuous.texts == text_pipe(prompts, max_new_tokens=6, stop=stop).texts
    assert not continuous.texts[0] and any(continuous.texts)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "msd", "prompt-lookup"])
def test_answers_of_the_shipped_model(llava_pipe, method):
    colours = ["red", "blue", "green", "white", "black"]
    pictures = [Image.new("RGB", (96, 96), colour) for colour in colours]
    asked = ["What is it?", "Describe the picture.", "How many?", "Describe the picture."]
    asked.append("Where is it?")
    options = dict(method=method, temperature=1.0, max_new_tokens=24)
    with batch_invariant():
        continuous = llava_pipe(pictures, asked, seed=SEEDS[:5], batch_size=2, **options)
        whole = llava_pipe(pictures, asked, seed=SEEDS[:5], **options)
    assert continuous.answers == whole.answers
    assert len({len(ids) for ids in continuous.tokens}) > 1
