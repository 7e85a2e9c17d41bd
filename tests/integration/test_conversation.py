"""Turns of a conversation are the pipeline's answers, and read only what is new."""

import copy

import pytest
import torch
from PIL import Image

import specmm
from specmm.serving.prefixes import PAGE

RED = Image.new("RGB", (96, 96), "red")


@pytest.fixture(scope="module")
def talk(llava_pipe):
    return specmm.Conversation(llava_pipe, max_new_tokens=12)


def test_turns_are_the_pipelines_and_read_what_is_new(talk, llava_pipe):
    first = talk.ask("What is in the picture, where is it and what does it look like?", [RED])
    assert talk.last.cached == 0 and talk.last.certificate.startswith("exact")
    read = talk.last.prompt_tokens
    asked = [*talk.messages, {"role": "user", "content": "How many are there?"}]
    second = "".join(talk.stream("How many are there?"))
    assert talk.last.prompt_tokens > read
    assert talk.last.cached >= (read - 1) // PAGE * PAGE, "the picture is not read again"
    plain = dict(method="ar", max_new_tokens=12)
    assert first == llava_pipe(messages=asked[:1], **plain).answers[0]
    assert second == llava_pipe(messages=asked, **plain).answers[0]
    assert [one["role"] for one in talk.messages] == ["user", "assistant"] * 2


def test_what_goes_wrong_is_forgotten(talk):
    before = talk.messages
    with pytest.raises(ValueError, match="must fit"):
        talk.ask("word " * 5000)
    stream = talk.stream("What is red?")
    next(stream)
    stream.close()
    assert talk.messages is before
    assert talk.ask("What is red?"), "it goes on"


def test_a_conversation_that_is_forgotten_leaves_no_thread(llava_pipe):
    talk = specmm.Conversation(llava_pipe)
    thread = talk.engine().thread
    assert thread.is_alive()
    del talk
    assert not thread.is_alive()


@pytest.mark.parametrize("change", ["in place", "load_state_dict", "a module"])
def test_other_weights_forget_what_was_read(change):
    pipe = specmm.VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)
    talk = specmm.Conversation(pipe, temperature=0, max_new_tokens=8)
    talk.ask("What is red, and what is beside it?")
    layer = pipe.model.model.language_model.layers[0].mlp.down_proj
    other = -layer.weight.data
    if change == "in place":
        layer.weight.data.copy_(other)
    elif change == "load_state_dict":
        layer.load_state_dict({"weight": other})
    else:
        pipe.model.model.language_model.layers[0].mlp.down_proj = copy.deepcopy(
            layer
        ).requires_grad_(False)
        pipe.model.model.language_model.layers[0].mlp.down_proj.weight.copy_(other)
    messages = [*talk.messages, {"role": "user", "content": "What color is it?"}]
    wanted = pipe(messages=messages, method="ar", max_new_tokens=8).answers[0]
    assert talk.ask("What color is it?") == wanted
    assert talk.last.cached == 0
