"""MSD drafters learn and draft for models of every kind of attention to pictures: what trains them
is what the model's own processor makes, and greedy answers stay those of ``generate``.
"""

import json

import pytest
import torch
from PIL import Image

from specmm import VQAPipeline
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.conversations import Line, reader
from specmm.recipes.recipe import train
from specmm.recipes.training.msd import read_slots
from specmm.vlm.asking import Questions
from tests.integration.vlm_models import END, save

LENGTH = 20
SETTINGS = dict(steps=41, batch=4, width=32, scenes=2, ramp=20, lr=1e-2)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with a wide picture and a high one."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, size in (("wide.png", (40, 20)), ("high.png", (24, 40))):
        Image.effect_noise(size, 120).convert("RGB").save(folder / name)
    return folder


@pytest.fixture(scope="module")
def lines(pictures):
    """Questions about one picture, about two and about none."""
    shown = ["wide.png", ["wide.png", "high.png"], ["high.png"]]
    rows = [
        dict(question=f"is it {word}?", answer=f"{word} it is", image=shown[i % 3])
        for i, word in enumerate(("red", "blue", "one", "a dog", "a box", "in it"))
    ]
    rows.append({"question": "what is a dog", "answer": "it is a cat"})
    (pictures / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pictures / "lines.jsonl"


@pytest.fixture(scope="module", params=["qwen2.5-vl"])
def trained(request, lines, tmp_path_factory):
    """Each kind of model with a drafter that the recipe made."""
    folder = save(request.param, tmp_path_factory.mktemp("model"))
    train("msd", model=folder, data=lines, out=folder / "run", **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def pipe(trained):
    return VQAPipeline.from_pretrained(trained, method="msd", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def asked(pictures):
    """Of no picture, of one and of two, of different lengths."""
    wide, high = (Image.open(pictures / name) for name in ("wide.png", "high.png"))
    return [None, wide, [wide, high]], ["what is this", "how many", "is it red?"]


@pytest.fixture(scope="module")
def wanted(pipe, asked):
    """What transformers' own generate answers, up to the first end."""
    inputs = Questions.of(*asked).inputs(pipe.processor)
    found = pipe.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
    rows = [row[inputs["input_ids"].shape[1] :].tolist() for row in found]
    ends = [min([i + 1 for i, t in enumerate(row) if t in (2, END)] or [LENGTH]) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=["batch", "refilled"])
def test_greedy_answers_are_those_of_generate(pipe, asked, wanted, options):
    out = pipe(*asked, max_new_tokens=LENGTH, temperature=0.0, **options)
    assert [ids.tolist() for ids in out.tokens] == wanted
    assert out.stats.tau > 1


def test_the_recipe_learns(trained):
    curve = (trained / "run" / "loss.csv").read_text().splitlines()
    losses = [float(row.split(",")[1]) for row in curve[1:]]
    assert losses[-1] < 0.9 * losses[0]


def own_states(pipe, line, end):
    """By the model's own forward over one whole conversation: the decoder's inputs, its states,
    and where the answer begins.
    """
    inputs = Questions.of(line.images, line.question).inputs(pipe.processor)
    answer = [*pipe.tokenizer.encode(line.answer, add_special_tokens=False), end]
    start = inputs["input_ids"].shape[1]
    for name, value in inputs.items():
        if value.shape == (1, start):
            new = {"input_ids": answer, "attention_mask": [1] * len(answer)}
            more = torch.tensor([new.get(name, [0] * len(answer))])
            inputs[name] = torch.cat([value, more], dim=1)
    seen = []
    decoder = pipe.model.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        found = pipe.model.model(**inputs, use_cache=False).last_hidden_state
    handle.remove()
    return seen[0][0], found[0], start


def test_what_trains_a_head_is_what_the_model_itself_sees(pipe, pictures):
    """In a ragged batch, of everything that the processor makes."""
    wide, high = str(pictures / "wide.png"), str(pictures / "high.png")
    talks = [
        Line("is it red?", "yes", wide),
        Line("what is it", "a dog", None),
        Line("how many", "two", [high, wide]),
    ]
    target = VLMTarget(pipe.model, Processor(1.0))
    target.wants_context = True
    slots = read_slots(target, talks, read=reader(pipe.processor, target))
    for row, line in enumerate(talks):
        inputs, states, start = own_states(pipe, line, END)
        count = len(states) - 1
        answers = torch.arange(count) >= start - 1
        assert slots.mask[row, :count].tolist() == answers.tolist()
        assert not slots.mask[row, count:].any()
        for found, own in (
            (slots.embeddings, inputs[1:]),
            (slots.hidden, states[:-1]),
            (slots.wanted, states[1:]),
        ):
            torch.testing.assert_close(found[row, :count], own, rtol=1e-4, atol=1e-4)


def test_a_loaded_head_reads_tokens_as_the_decoder_does(pipe):
    """Gemma's are scaled after the table that they come from."""
    target = VLMTarget(pipe.model, Processor(1.0))
    head = pipe.drafter("msd")
    ids = torch.arange(head.config.vocab_size)
    assert torch.equal(head.embed_tokens(ids), target.embed(ids))
