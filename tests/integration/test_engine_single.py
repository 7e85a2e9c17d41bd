"""An engine of models whose rows cannot join others: requests are answered one after the other."""

import pytest
import torch
import transformers

import specmm
from specmm.core.processors import Processor
from specmm.hf.models.single import SingleTarget
from specmm.hf.models.target import VLMTarget
from specmm.serving.engine import BatchEngine
from specmm.serving.opening import engine_of, warm_up
from specmm.serving.preparation import Limits
from specmm.serving.requests import Asked
from tests.engines import Answers, at_random, chats_about
from tests.integration.test_engine_states import KINDS, plain, texts
from tests.integration.test_hybrids import HEADS, SIZES, made
from tests.tiny import parts, vlm_folders
from tests.tiny.processors import PROCESSORS
from tests.tiny.vlms import random_model

TURN = 30  # positions, after which a longrope's others are used
STRETCHED = 40  # positions, after which dynamic ones depend on a text's length
LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=4.0)


def longrope():
    rope = LONG | dict(rope_theta=10000.0, original_max_position_embeddings=TURN)
    config = transformers.Phi3Config(
        **SIZES, rope_parameters=rope, original_max_position_embeddings=TURN
    )
    return transformers.Phi3ForCausalLM(config)


def dynamic():
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
    sizes = SIZES | dict(max_position_embeddings=STRETCHED)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))


def pipe_of(name):
    torch.manual_seed(0)
    own = {"longrope": longrope, "dynamic": dynamic}
    model = parts.shaken(own[name]()) if name in own else made(name)
    return specmm.TextPipeline(model, vlm_folders.tokenizer())


def lies_on_one_side(name, length, more):
    """Whether positions of a text of ``length`` do not change amid an answer of ``more``."""
    if name == "longrope":
        return not length <= TURN < length + more
    return name != "dynamic" or length + more <= STRETCHED


CASES = [(name, "suffix") for name in ("longrope", "dynamic", "falcon_h1", "mamba")]
CASES += [(name, head) for name in ("longrope", "falcon_h1") for head in HEADS]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_answers_are_the_pipelines(name, method, monkeypatch):
    at_random(monkeypatch)
    pipe = pipe_of(name)
    if method in HEADS:
        pipe.drafters.given[method] = HEADS[method](VLMTarget(pipe.model, Processor(0.0)))
    engine = engine_of(pipe, Limits(rows=3), method)
    assert isinstance(engine.target, SingleTarget)
    warm_up(engine)
    said = Answers(engine)
    asked = [
        (ids, kind)
        for kind in KINDS
        for ids in texts()[1::2]  # one after the other, they show nothing of one another
        if lies_on_one_side(name, len(ids), kind["max_new_tokens"])
    ]
    for ids, kind in asked:
        said.ask(prompt=ids, options=kind, goes_on=True, logprobs=1)
    said.wait()
    for i, (ids, kind) in enumerate(asked):
        assert not said.end(i).error
        assert said.tokens(i) == plain(pipe, ids, kind), (ids, kind)
    assert engine.counts()["kept_tokens_total"]
    engine.close()


@pytest.mark.parametrize(
    ("name", "most", "why"),
    [
        ("longrope", TURN, f"within the first {TURN} positions of .* got 31 positions"),
        ("dynamic", STRETCHED, f"must fit {STRETCHED} tokens, got 3 .* max_tokens 38"),
    ],
)
def test_no_answer_crosses_where_positions_change(name, most, why):
    engine = engine_of(pipe_of(name), Limits())
    said = Answers(engine)
    said.ask(prompt=[9, 3, 11], goes_on=True)
    with pytest.raises(ValueError, match=why):
        engine.submit(Asked(prompt=[9, 3, 11], options=dict(max_new_tokens=most - 2)), print)
    said.wait()
    assert len(said.tokens(0)) == most - 3
    engine.close()


def test_a_conversation():
    pipe = pipe_of("longrope")
    pipe.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    talk = specmm.Conversation(pipe, max_new_tokens=4)
    for question in ("one two", "red dog"):
        messages = [*talk.messages, {"role": "user", "content": question}]
        assert talk.ask(question) == pipe(messages=messages, max_new_tokens=4).texts[0]


@pytest.mark.parametrize(("name", "joins"), [("mllama", False), ("gemma4", True), ("kimi", True)])
def test_answers_about_pictures_are_the_pipelines(name, joins, monkeypatch):
    """The first has layers that attend to pictures alone, the last two read ids, not embeddings."""
    at_random(monkeypatch)
    pipe = specmm.VQAPipeline(parts.ending(random_model(name)), PROCESSORS[name]())
    engine = BatchEngine(pipe, Limits(rows=3))
    assert engine.target.joins == joins
    said = Answers(engine)
    chats = chats_about([(20, 12), None, (20, 12), None])
    for chat in chats:
        said.ask(messages=chat, options=dict(max_new_tokens=20))
    said.wait()
    for i, chat in enumerate(chats):
        answer = pipe(messages=chat, method="ar", max_new_tokens=20)
        assert said.tokens(i) == answer.tokens[0].tolist()
    engine.close()
