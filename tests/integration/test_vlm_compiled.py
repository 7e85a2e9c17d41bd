"""``compiled=True`` for answers about pictures on a CPU: the same tokens, or a refusal."""

import pytest

from specmm.programs.compiled import NotCompiled
from specmm.vlm.pipeline import VQAPipeline
from tests.noisy import noisy
from tests.tiny.processors import PROCESSORS
from tests.tiny.vlms import random_model

LENGTH = 10
QUESTIONS = ["what is this", "how many red dog box a"]


def asked(name):
    """A pipeline, two pictures and their questions, which have different lengths."""
    pictures = [noisy((20, 12), 40 + 30 * i).convert("RGB") for i in range(2)]
    return VQAPipeline(random_model(name), PROCESSORS[name]()), (pictures, QUESTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["internvl", "qwen3-vl", "idefics3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_answers_are_those_of_uncompiled_steps(name, rows, traced):
    pipe, given = asked(name)
    given = [part[:rows] for part in given]
    for options in (dict(temperature=0), dict(temperature=0.8, seed=3, top_k=9)):
        options |= dict(method="ar", max_new_tokens=LENGTH)
        wanted = pipe(*given, **options)
        for _ in range(2):  # traced, and found
            found = pipe(*given, compiled=True, **options)
            assert found.compiled and not wanted.compiled
            assert [x.tolist() for x in found.tokens] == [x.tolist() for x in wanted.tokens]


@pytest.mark.slow
def test_a_hook_after_a_compiled_answer_is_heard(traced):
    pipe, given = asked("internvl")
    options = dict(method="ar", max_new_tokens=LENGTH, temperature=0)
    before = pipe(*given, compiled=True, **options)
    layer = pipe.model.get_decoder().layers[0]
    handle = layer.register_forward_hook(lambda module, args, out: out * 1.5)
    wanted, found = (pipe(*given, compiled=way, **options) for way in (False, True))
    handle.remove()
    assert [x.tolist() for x in found.tokens] == [x.tolist() for x in wanted.tokens]
    assert [x.tolist() for x in found.tokens] != [x.tolist() for x in before.tokens]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gemma3", {}, "needs full attention"),  # windows
        ("internvl", {"method": "prompt-lookup"}, "needs ar or a block drafter"),
        ("internvl", {"batch_size": 1}, "answers all at once"),
        ("internvl", {"stop": "a"}, "end tokens only"),
    ],
)
def test_what_programs_do_not_serve_is_refused_in_a_sentence(name, options, message):
    pipe, given = asked(name)
    options = dict(method="ar", max_new_tokens=4) | options
    with pytest.raises(NotCompiled, match=message):
        pipe(*given, compiled=True, **options)
    assert pipe(*given, **options).answers
