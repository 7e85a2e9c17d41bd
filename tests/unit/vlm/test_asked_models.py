"""``VQAPipeline`` on tiny models of many types with their own processors: rows of every kind are
answered as generate answers them.
"""

import pytest
import torch
from PIL import Image

from specmm.runs.run import kind_of
from specmm.vlm.asking import Questions
from specmm.vlm.pipeline import VQAPipeline
from tests.unit.vlm.tiny_vlms import CONFIGS, FILMS, PROCESSORS, random_model

QUESTIONS = ["what is this", "how many red dog", "where is the box a", "one two three"]
LENGTH = 8


@pytest.fixture(scope="module")
def noise():
    return [Image.effect_noise((20, 12), 60 + 20 * i).convert("RGB") for i in range(7)]


@pytest.fixture(scope="module", params=CONFIGS)
def asked(request, noise):
    """A pipeline, and pictures and videos of four questions: two pictures, none, one, a video."""
    name = request.param
    # Glm4v's class takes a batch's pictures and videos for one another, generate itself fails
    film = noise[3:] if name in FILMS and name != "glm4v" else None
    pipe = VQAPipeline(random_model(name), PROCESSORS[name]())
    shown = [noise[:2], None, noise[2], noise[4:6]]
    if film is not None:
        shown[3] = None
    return pipe, shown, [None] * 3 + [film]


def generated(pipe, pictures, questions, videos):
    """What the model's own generate answers, greedily, padded at the left."""
    inputs = Questions.of(pictures, questions, videos=videos).inputs(pipe.processor)
    out = pipe.model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
    return out[:, inputs["input_ids"].shape[1] :]


def same(ours, theirs):
    """Whether answers are those of generate, up to and with their end tokens."""
    pairs = zip(ours, theirs, strict=True)
    whole = all(len(a) == len(b) or int(a[-1]) == 2 for a, b in zip(ours, theirs, strict=True))
    return whole and all(torch.equal(a, b[: len(a)]) for a, b in pairs)


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_answers_are_those_of_generate(asked, method):
    pipe, pictures, videos = asked
    wanted = generated(pipe, pictures, QUESTIONS, videos)
    options = dict(max_new_tokens=LENGTH, method=method)
    assert same(pipe(pictures, QUESTIONS, videos=videos, **options).tokens, wanted)
    for row in range(4):  # none is padded
        own = generated(pipe, [pictures[row]], [QUESTIONS[row]], [videos[row]])
        assert same(pipe(pictures[row], QUESTIONS[row], videos=videos[row], **options).tokens, own)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name in FILMS])
def test_a_video_is_seen(name, noise):
    pipe = VQAPipeline(random_model(name), PROCESSORS[name]())
    film = noise[3:]
    options = dict(max_new_tokens=LENGTH, method="prompt-lookup", videos=film)
    ours = pipe(None, QUESTIONS[0], **options).tokens
    assert same(ours, generated(pipe, [None], QUESTIONS[:1], [film]))
    assert not same(ours, generated(pipe, [None], QUESTIONS[:1], [film[::-1]]))


def test_rows_that_wait_bring_what_they_show(asked):
    pipe, pictures, videos = asked
    options = dict(max_new_tokens=LENGTH, method="prompt-lookup", videos=videos)
    together = pipe(pictures, QUESTIONS, **options)
    if pipe.model.config.model_type == "mllama":
        with pytest.raises(ValueError, match=r"batch_size must be 0 .* all pictures of a batch"):
            pipe(pictures, QUESTIONS, batch_size=2, **options)
        return
    assert pipe(pictures, QUESTIONS, batch_size=2, **options).answers == together.answers


def test_what_is_shown_matters(asked, noise):
    """Or every test here could pass with pictures that nobody looks at."""
    pipe, pictures, videos = asked
    first = generated(pipe, pictures, QUESTIONS, videos)
    other = [noise[4:6], pictures[1], noise[6], pictures[3]]
    assert not torch.equal(generated(pipe, other, QUESTIONS, videos), first)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_is_opened_and_answers_the_same(name, noise, tmp_path):
    """The model, the processor, its template and its parts come back from their files."""
    model, processor = random_model(name), PROCESSORS[name]()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert kind_of(str(tmp_path)) == "questions"
    opened = VQAPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    options = dict(max_new_tokens=LENGTH, method="prompt-lookup")
    wanted = VQAPipeline(model, processor)(noise[0], QUESTIONS[0], **options)
    assert torch.equal(opened(noise[0], QUESTIONS[0], **options).tokens[0], wanted.tokens[0])
