"""``VQAPipeline`` on tiny models of many types with their own processors: rows of every kind are
answered as generate answers them.
"""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import specmm
from specmm.hf.loading.placing import moved
from specmm.hf.models.families import Family
from specmm.runs.run import kinds_of
from specmm.vlm.asking import Questions
from specmm.vlm.pipeline import VQAPipeline
from tests.noisy import noisy
from tests.tiny.processors import FILMS, PROCESSORS
from tests.tiny.vlms import CONFIGS, random_model

QUESTIONS = ["what is this", "how many red dog", "where is the box a", "one two three"]
LENGTH = 8
FAILING = {  # where generate itself fails
    "glm4v": "its class takes the pictures and videos of a batch for one another",
    "kimi": "its class splits a video's features by frames that it has averaged",
}
SEEN = [name for name in CONFIGS if name in FILMS and name != "kimi"]


@pytest.fixture(scope="module")
def noise():
    return [noisy((20, 12), 40 + 30 * i).convert("RGB") for i in range(7)]


TYPES = ["internvl", "gemma3", "lfm2-vl", "qwen3-vl", "mllama", "idefics3", "kimi", "glm4v"]
TYPES.append("janus")


@pytest.fixture(scope="module", params=TYPES)
def asked(request, noise):
    """A pipeline, pictures and videos of four questions (two pictures, none, one, a video), and
    what generate answers to all together.
    """
    name = request.param
    film = noise[3:] if name in FILMS and name not in FAILING else None
    pipe = VQAPipeline(random_model(name), PROCESSORS[name]())
    shown = [noise[:2], None, noise[2], noise[4:6]]
    if film is not None:
        shown[3] = None
    videos = [None] * 3 + [film]
    return pipe, shown, videos, generated(pipe, shown, QUESTIONS, videos)


def generated(pipe, pictures, questions, videos):
    """What the model's own generate answers, greedily, padded at the left."""
    inputs = Questions.of(pictures, questions, videos=videos).inputs(pipe.processor)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}  # Llama 4's
    out = pipe.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
    return out[:, inputs["input_ids"].shape[1] :]


def same(ours, theirs):
    """Whether answers are those of generate, up to and with their end tokens."""
    pairs = zip(ours, theirs, strict=True)
    whole = all(len(a) == len(b) or int(a[-1]) == 2 for a, b in zip(ours, theirs, strict=True))
    return whole and all(torch.equal(a, b[: len(a)]) for a, b in pairs)


def test_answers_are_those_of_generate(asked):
    pipe, pictures, videos, wanted = asked
    options = dict(max_new_tokens=LENGTH, method="prompt-lookup")
    assert same(pipe(pictures, QUESTIONS, videos=videos, **options).tokens, wanted)
    for row in range(4):  # none is padded
        own = generated(pipe, [pictures[row]], [QUESTIONS[row]], [videos[row]])
        assert same(pipe(pictures[row], QUESTIONS[row], videos=videos[row], **options).tokens, own)


@pytest.mark.parametrize("name", SEEN)
def test_a_video_is_seen(name, noise):
    pipe = VQAPipeline(random_model(name), PROCESSORS[name]())
    film = noise[3:]
    options = dict(max_new_tokens=LENGTH, method="prompt-lookup", videos=film)
    ours = pipe(None, QUESTIONS[0], **options).tokens
    assert same(ours, generated(pipe, [None], QUESTIONS[:1], [film]))
    assert not same(ours, generated(pipe, [None], QUESTIONS[:1], [film[::-1]]))


def test_rows_that_wait_bring_what_they_show(asked):
    pipe, pictures, videos, _ = asked
    options = dict(max_new_tokens=LENGTH, method="prompt-lookup", videos=videos)
    together = pipe(pictures, QUESTIONS, **options)
    if pipe.model.config.model_type == "mllama":
        with pytest.raises(ValueError, match=r"batch_size must be 0 .* all pictures of a batch"):
            pipe(pictures, QUESTIONS, batch_size=2, **options)
        return
    assert pipe(pictures, QUESTIONS, batch_size=2, **options).answers == together.answers


def test_what_is_shown_matters(asked, noise):
    """Or every test here could pass with pictures that nobody looks at."""
    pipe, pictures, videos, first = asked
    other = [noise[4:6], pictures[1], noise[6], pictures[3]]
    assert not torch.equal(generated(pipe, other, QUESTIONS, videos), first)


@pytest.mark.parametrize("name", TYPES)
def test_a_folder_is_opened_and_answers_the_same(name, noise, tmp_path):
    """The model, the processor, its template and its parts come back from their files."""
    model, processor = random_model(name), PROCESSORS[name]()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert "questions" in kinds_of(str(tmp_path))
    opened = VQAPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    options = dict(max_new_tokens=LENGTH, method="prompt-lookup")
    wanted = VQAPipeline(model, processor)(noise[0], QUESTIONS[0], **options)
    assert torch.equal(opened(noise[0], QUESTIONS[0], **options).tokens[0], wanted.tokens[0])


class Forced(LogitsProcessor):
    """Makes a placeholder of the second new token."""

    def __init__(self, place, token):
        self.place, self.token = place, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != self.place:
            return scores
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([self.token]), 0.0)


# Janus's generate passes no processors on
READ = [name for name in CONFIGS if name != "janus"]


@pytest.mark.parametrize("name", READ)
def test_a_placeholder_that_is_generated_is_read_as_by_generate(name):
    """Some classes embed it as padding."""
    model, processor = random_model(name), PROCESSORS[name]()
    model.generation_config.eos_token_id = None
    inputs = Questions.of(None, QUESTIONS[0]).inputs(processor)
    options = dict(max_new_tokens=LENGTH, do_sample=False)
    for token in Family.of(model).image_tokens:
        forced = LogitsProcessorList([Forced(inputs["input_ids"].shape[1] + 1, token)])
        wanted = model.generate(**inputs, **options, logits_processor=forced)
        assert int(wanted[0, inputs["input_ids"].shape[1] + 1]) == token
        fn = specmm.custom_generate()
        ours = model.generate(**inputs, **options, logits_processor=forced, custom_generate=fn)
        assert torch.equal(ours, wanted)


def test_complex_numbers_stay_whole_in_another_dtype():
    """Llama 4's vision tower turns by such."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_buffer("turns", torch.tensor([1j, 2.0 - 3j]))
    wanted = model[0].turns.clone()
    found = moved(model, "cpu", torch.bfloat16)
    assert found[0].weight.dtype == torch.bfloat16
    assert torch.equal(found[0].turns, wanted)
