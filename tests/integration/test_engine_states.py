"""An engine of models with states: rows join and leave amid what layers hold of the others."""

import pytest
import torch

import specmm
from specmm.core.decode import decode_plain
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.models.rows import Reading
from specmm.hf.models.target import VLMTarget
from specmm.kernels.tree_attention.interface import NAME
from specmm.serving.engine import BatchEngine
from specmm.serving.opening import engine_of
from specmm.serving.preparation import Limits
from tests.engines import Answers, at_random, chats_about
from tests.integration.test_hybrids import HEADS, made
from tests.tiny import parts, vlm_folders

KINDS = [
    dict(max_new_tokens=30),
    dict(max_new_tokens=9, temperature=1.0, seed=5),
    dict(max_new_tokens=21, repetition_penalty=1.3),
    dict(max_new_tokens=1),
]


def texts():
    """Prompts of several lengths [n], of which some repeat themselves."""
    draw = torch.Generator().manual_seed(0)
    found = [torch.randint(8, 40, (n,), generator=draw).tolist() for n in (3, 7, 12, 5)]
    return [*found, [9, 3, 11] * 6, [20, 31, 12, 5] * 11]


def plain(pipe, ids, kind):
    """The tokens that plain decoding answers ``ids`` with."""
    options = pipe.options(kind)
    prompt = pipe.read([ids], options)
    target = VLMTarget(pipe.model, options.processor)
    drawn = Uniforms(options.generators(1, target.device))
    *_, end = decode_plain(target, prompt, kind["max_new_tokens"], drawn)
    return end.row(0).tolist()


CASES = [(name, "suffix") for name in ("qwen3_5", "olmo_hybrid", "lfm2", "jamba")]
CASES += [("qwen3_5", head) for head in HEADS]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_answers_are_the_pipelines(name, method, monkeypatch):
    at_random(monkeypatch)
    pipe = specmm.TextPipeline(made(name), vlm_folders.tokenizer())
    if method in HEADS:
        pipe.drafters.given[method] = HEADS[method](VLMTarget(pipe.model, Processor(0.0)))
    engine = engine_of(pipe, Limits(rows=3), method)
    said = Answers(engine)
    asked = [(ids, kind) for kind in KINDS for ids in texts()]
    for ids, kind in asked:
        said.ask(prompt=ids, options=kind, goes_on=True)
    said.wait()
    for i, (ids, kind) in enumerate(asked):
        assert not said.end(i).error
        assert said.tokens(i) == plain(pipe, ids, kind), (ids, kind)
    counts = engine.counts()
    assert counts["kept_tokens_total"] and counts["cached_tokens_total"] == 0
    engine.close()


@pytest.mark.parametrize("name", ["qwen3.5", "qwen2.5-vl"])
def test_answers_about_pictures_are_the_pipelines(name, monkeypatch):
    """Positions in parts; of the second, what is asked without pictures is read beside rounds."""
    at_random(monkeypatch)
    torch.manual_seed(0)
    model, processor = vlm_folders.MODELS[name]()
    model.set_attn_implementation(NAME)
    pipe = specmm.VQAPipeline(parts.ending(parts.shaken(model)), processor)
    engine = BatchEngine(pipe, Limits(rows=3))
    beside, real = [], Reading.next
    monkeypatch.setattr(Reading, "next", lambda *args: beside.append(args) or real(*args))
    said = Answers(engine)
    chats = chats_about([(16, 16), (32, 16), None, None, (16, 24), None])
    for chat in chats:
        said.ask(messages=chat, options=dict(max_new_tokens=20))
    said.wait()
    for i, chat in enumerate(chats):
        answer = pipe(messages=chat, method="ar", max_new_tokens=20)
        assert said.tokens(i) == answer.tokens[0].tolist()
    assert bool(beside) == engine.target.packs == (name == "qwen2.5-vl")
    engine.close()
