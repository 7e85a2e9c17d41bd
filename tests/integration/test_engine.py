"""Answers of an engine are those of the pipeline, whoever else is there and whatever is drafted."""

import itertools
import queue
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LogitsProcessor

import specmm
from specmm.core.decode import decode_plain
from specmm.core.randomness import Uniforms
from specmm.core.turns import turns_of
from specmm.hf.models.target import VLMTarget
from specmm.serving.costs import Pieces
from specmm.serving.engine import BatchEngine
from specmm.serving.opening import open_engine
from specmm.serving.preparation import Limits
from specmm.serving.requests import Asked, Busy, Ended
from specmm.verify.matching import Matching
from tests.engines import Answers, at_random
from tests.sampling import p_value

TEXTS = [
    "def add(a, b):",
    "def is_even(n):\n",
    "class Stack:\n    def push(self",
    'def longest(words):\n    """Return the longest."""\n',
    "import os\n\ndef read(path):\n",
    "for i in range(10):\n    print(",
]
KINDS = [
    dict(max_new_tokens=24),
    dict(max_new_tokens=17, temperature=1.0, seed=5),
    dict(max_new_tokens=30, temperature=0.8, top_k=20, seed=6),
    dict(max_new_tokens=40, stop=["return", "self"]),
    dict(max_new_tokens=20, repetition_penalty=1.3),
    dict(max_new_tokens=20, temperature=1.0, min_p=0.05, seed=1),
    dict(max_new_tokens=1),
    dict(max_new_tokens=12, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=9),
]


@pytest.fixture(scope="module")
def wanted(coder_pipe):
    """What the pipeline answers to every text by every kind of options."""
    pairs = itertools.product(TEXTS[:4], range(len(KINDS)))
    return {(text, kind): coder_pipe(text, method="ar", **KINDS[kind]) for text, kind in pairs}


@pytest.fixture
def choosing(monkeypatch):
    at_random(monkeypatch)


@pytest.mark.parametrize("method", ["ar", "suffix", "block"])
def test_answers_are_the_pipelines(method, wanted, choosing):
    engine = open_engine("pocket/coder", Limits(rows=5), method=method)
    asked = list(wanted)
    said = Answers(engine)
    for text, kind in asked:
        said.ask(prompt=text, options=KINDS[kind])
    said.wait()
    for i, one in enumerate(asked):
        out, end = wanted[one], said.end(i)
        assert not end.error
        assert said.tokens(i) == out.tokens[0].tolist(), one
        assert said.text(i) == out.texts[0]
        assert end.reason == out.finish_reasons[0]
        assert (end.tokens, end.prompt_tokens) == (len(out.tokens[0]), out.prompt_tokens[0])
        assert end.certificate.startswith("exact")
    engine.close()


def test_what_remains_of_a_long_prompt_is_read_in_pieces_that_there_is_room_for(
    coder_pipe, monkeypatch
):
    monkeypatch.setattr(Pieces, "MOST", 32)
    engine = BatchEngine(coder_pipe, Limits(rows=4))
    said = Answers(engine)
    ids = coder_pipe.encode(TEXTS[3] * 20)[0]
    for prompt in (ids[:40], ids):
        said.ask(prompt=prompt, options=dict(max_new_tokens=8))
        said.wait()
    assert said.end(1).cached == 48 - 16
    assert said.text(1) == coder_pipe(TEXTS[3] * 20, method="ar", max_new_tokens=8).texts[0]
    engine.close()


def picture(i):
    return Image.fromarray(np.random.RandomState(i).randint(0, 255, (64, 64, 3), np.uint8))


def test_answers_about_pictures_are_the_pipelines(choosing):
    pipe = specmm.VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)
    questions = ["What is this?", "How many circles are there?", "Describe it.", None]
    chats = []
    for i, question in enumerate(questions):
        parts = [{"type": "image", "image": picture(i)}] if question else []
        parts.append({"type": "text", "text": question or "Who are you?"})
        chats.append([{"role": "user", "content": parts}])
    kinds = [dict(max_new_tokens=20), dict(max_new_tokens=9, temperature=1.0, seed=3)]
    engine = open_engine("pocket/llava", Limits(rows=3))
    assert engine.drafts.network is not None
    said = Answers(engine)
    asked = list(itertools.product(chats, kinds))
    for chat, options in asked:
        said.ask(messages=chat, options=options)
    said.wait()
    for i, (chat, options) in enumerate(asked):
        out = pipe(messages=chat, method="ar", **options)
        assert said.text(i) == out.answers[0]
        assert said.tokens(i) == out.tokens[0].tolist()
    engine.close()


def test_long_prompts_are_read_in_pieces_and_others_go_on(coder_pipe, monkeypatch):
    monkeypatch.setattr(Pieces, "MOST", 32)
    engine = BatchEngine(coder_pipe, Limits(rows=4, drafts=False))
    long = TEXTS[3] * 30
    said = Answers(engine)
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=150))
    while not said.told[0]:
        pass
    before = engine.counts()["rounds_total"]
    said.ask(prompt=long, options=dict(max_new_tokens=8))
    said.ends[1].wait(60)
    assert engine.counts()["rounds_total"] - before > 8 + 3
    said.wait()
    out = coder_pipe(long, method="ar", max_new_tokens=8)
    assert said.text(1) == out.texts[0]
    assert said.text(0) == coder_pipe(TEXTS[0], method="ar", max_new_tokens=150).texts[0]
    engine.close()


def test_a_short_prompt_does_not_wait_for_a_long_one(coder_pipe, monkeypatch):
    monkeypatch.setattr(Pieces, "MOST", 32)
    engine = BatchEngine(coder_pipe, Limits(rows=4))
    said, order = Answers(engine), []
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=300))
    while not said.told[0]:
        pass
    for name, prompt in (("long", [7, 8, 9] * 250), ("short", TEXTS[1]), ("short", TEXTS[2])):
        done = threading.Event()
        said.ends.append(done)

        def tell(one, name=name, done=done):
            order.append(name)
            if isinstance(one, Ended):
                assert not one.error
                done.set()

        engine.submit(Asked(prompt=prompt, options=dict(max_new_tokens=2)), tell)
    said.wait()
    assert order.index("long") == order.count("short"), "they end before its first token"
    engine.close()


def test_whoever_cancels_frees_the_row_and_others_get_a_sentence(coder_pipe):
    engine = BatchEngine(coder_pipe, Limits(rows=1, waiting=1))
    said = Answers(engine)
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=200))
    while not engine.counts()["rows"]:
        pass
    said.ask(prompt=TEXTS[1], options=dict(max_new_tokens=4))
    with pytest.raises(Busy, match="1 requests wait"):
        said.ask(prompt=TEXTS[2])
    said.told.pop(), said.ends.pop()
    said.tickets[0].cancel()
    said.wait()
    assert [said.end(i).reason for i in range(2)] == ["cancelled", "length"]
    with pytest.raises(ValueError, match="must fit"):
        said.ask(prompt=TEXTS[2], options=dict(max_new_tokens=10_000))
    with pytest.raises(ValueError, match="batch_size is the server's"):
        said.ask(prompt=TEXTS[2], options=dict(batch_size=2))
    engine.close()
    with pytest.raises(Busy, match="stopping"):
        engine.submit(Asked(prompt="x"), print)


def test_a_round_that_fails_ends_its_answers_and_no_others(coder_pipe, monkeypatch):
    engine = BatchEngine(coder_pipe, Limits(rows=2))
    said = Answers(engine)
    real = engine.target.score

    def score(tree):
        monkeypatch.setattr(engine.target, "score", real)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.target, "score", score)
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=30))
    said.wait()
    assert said.end(0).reason == "error"
    assert "no memory" in said.end(0).error
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=9))
    said.wait()
    assert said.text(1) == coder_pipe(TEXTS[0], method="ar", max_new_tokens=9).texts[0]
    engine.close()


@pytest.mark.parametrize("method", ["ar", "block"])
def test_a_row_that_is_not_finite_ends_alone(coder_pipe, method):
    """Its memory, which others take over, and pages of its prompt hold nothing of it."""
    bad = 77
    said_once = dict(sequence_bias=[[[bad], 1000.0]], max_new_tokens=8)
    engine = open_engine("pocket/coder", Limits(rows=3), method=method)

    def poison(module, inputs, states):
        return states.masked_fill((inputs[0] == bad)[..., None], float("nan"))

    engine.pipe.model.get_input_embeddings().register_forward_hook(poison)
    said = Answers(engine)
    fine = dict(max_new_tokens=60)
    said.ask(prompt=TEXTS[0], options=fine)
    said.ask(prompt=TEXTS[3] * 3, options=said_once)  # longer than the one that takes its place
    said.ask(prompt=TEXTS[2], options=fine)
    said.ask(prompt=[*coder_pipe.encode(TEXTS[3])[0], bad] * 3)
    said.ask(prompt=TEXTS[4], options=fine)
    said.wait()
    for i in (1, 3):
        assert said.end(i).reason == "error"
        assert "logits must be finite" in said.end(i).error
    for i in (0, 2, 4):
        assert said.text(i) == coder_pipe(TEXTS[i], method="ar", **fine).texts[0]
    assert engine.counts()["error_total"] == 2
    engine.close()


def test_an_error_before_a_row_is_told_once(coder_pipe, monkeypatch):
    """Whoever waits hears of it, and the engine goes on."""
    engine = BatchEngine(coder_pipe, Limits(rows=2))
    said = Answers(engine)

    def fails(*_):
        raise RuntimeError("no such page")

    with monkeypatch.context() as patch:
        patch.setattr(engine.prefixes, "find", fails)
        said.ask(prompt=TEXTS[0])
        said.wait()
    assert said.end(0).error == "RuntimeError: no such page"
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=9))
    said.wait()
    assert said.end(1).reason == "length"
    engine.close()


def test_equal_requests_are_not_the_same_one(coder_pipe):
    """Those that wait are told apart, whichever of them is given up."""
    engine = BatchEngine(coder_pipe, Limits(rows=1))
    told = queue.SimpleQueue()
    asked = Asked(prompt=TEXTS[0], options=dict(max_new_tokens=30))
    tickets = [engine.submit(asked, told.put) for _ in range(5)]
    for i in (1, 3):
        tickets[i].cancel()
    ends = []
    while len(ends) < len(tickets):
        one = told.get(timeout=60)
        ends += [one.reason] if isinstance(one, Ended) else []
    assert sorted(ends) == ["cancelled", "cancelled", "length", "length", "length"]
    engine.close()


class Failing(LogitsProcessor):
    """Breaks after three tokens."""

    def __call__(self, ids, scores):
        if ids.shape[1] > 12:
            raise RuntimeError("no such word")
        return scores


@pytest.mark.parametrize("together", [1, 2])
def test_a_processor_that_fails_ends_its_answer_alone(coder_pipe, together):
    engine = BatchEngine(coder_pipe, Limits(rows=3))
    said = Answers(engine)
    for _ in range(together):
        given = dict(max_new_tokens=30, logits_processor=[Failing()])
        said.ask(prompt="def a", options=given)
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=30))
    said.wait()
    for i in range(together):
        assert (said.end(i).reason, said.end(i).error) == ("error", "RuntimeError: no such word")
    assert said.text(together) == coder_pipe(TEXTS[0], method="ar", max_new_tokens=30).texts[0]
    engine.close()


def test_an_answer_ends_when_its_time_is_over(coder_pipe):
    """Whether it has a row or waits for one."""
    engine = BatchEngine(coder_pipe, Limits(rows=1, seconds=1.0, drafts=False))
    said = Answers(engine)
    for text in TEXTS[:2]:
        given = dict(max_new_tokens=900, min_new_tokens=900)
        said.ask(prompt=text, options=given)
    said.wait()
    for i in range(2):
        assert said.end(i).reason == "timeout"
        assert said.end(i).error.startswith("an answer may take 1 seconds here")
    assert said.tokens(0)
    assert engine.counts()["timeout_total"] == 2
    engine.close()


def test_no_memory_for_prompts_or_a_batch_ends_in_sentences(coder_pipe, monkeypatch):
    engine = BatchEngine(coder_pipe, Limits(rows=2))
    said = Answers(engine)

    def none(*_):
        raise MemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_begin", none)
        said.ask(prompt=TEXTS[0])
        said.wait()
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=9))
    said.wait()
    assert said.end(1).reason == "length", "it goes on"
    monkeypatch.setattr(engine.target, "score", none)
    monkeypatch.setattr(engine, "_empty", none)
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=9))
    said.wait()
    for i in (0, 2):
        assert said.end(i).reason == "error"
        assert said.end(i).error == "MemoryError: no memory is left"
    engine.thread.join(10)
    with pytest.raises(Busy, match="stopping"):
        said.ask(prompt=TEXTS[0])


def test_logprobs_are_the_models(coder_pipe):
    engine = BatchEngine(coder_pipe, Limits(rows=2))
    said = Answers(engine)
    said.ask(prompt=TEXTS[0], options=dict(max_new_tokens=12, temperature=1.0, seed=2), logprobs=3)
    said.wait()
    found = [one for piece in said.told[0][:-1] for one in piece.logprobs]
    tokens = said.tokens(0)
    assert [one.token for one in found] == tokens
    ids = torch.tensor([coder_pipe.encode(TEXTS[0])[0] + tokens])
    with torch.inference_mode():
        scores = coder_pipe.model(ids).logits[0, -13:-1].log_softmax(-1)
    for one, own in zip(found, scores, strict=True):
        assert one.logprob == pytest.approx(float(own[one.token]), abs=1e-3)
        assert [top.token for top in one.top] == own.topk(3).indices.tolist()
    engine.close()


class Budget(LogitsProcessor):
    """A token after so many calls, which it counts."""

    def __init__(self):
        self.made = 0

    def __call__(self, ids, scores):
        self.made += 1
        if self.made == 9:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 42] = 0
        return scores


def test_processors_with_a_memory_hear_no_draft(coder_pipe, choosing):
    engine = BatchEngine(coder_pipe, Limits(rows=2))
    said = Answers(engine)
    for text in TEXTS:
        given = dict(max_new_tokens=20, logits_processor=[Budget()])
        said.ask(prompt=text, options=given)
    said.wait()
    for i, text in enumerate(TEXTS):
        out = coder_pipe(text, method="ar", max_new_tokens=20, logits_processor=[Budget()])
        assert said.tokens(i) == out.tokens[0].tolist()
        assert said.tokens(i)[8] == 42
    for temperature in (0.0, 1.0):
        locked = Budget()
        locked.lock = threading.Lock()  # which no copy has
        given = dict(max_new_tokens=9, temperature=temperature, logits_processor=[locked])
        said.ask(prompt="x", options=given)
    said.wait()
    # what a greedy row hears is what is kept
    out = coder_pipe("x", method="ar", max_new_tokens=9, logits_processor=[Budget()])
    assert said.tokens(len(TEXTS)) == out.tokens[0].tolist()
    assert "must be copyable, because drafts may be rejected" in said.end(len(TEXTS) + 1).error
    with pytest.raises(ValueError, match="stopping_criteria is the server's"):
        said.ask(prompt="x", options=dict(stopping_criteria=[lambda *_: False]))
    engine.close()


class Twin(Matching):
    """Keeps the likeliest of the drafts' tokens where it should draw one."""

    def result(self, tree, p, uniforms):
        found = super().result(tree, p, uniforms)
        found.next_token = p.gather(1, (found.kept - 1)[:, None, None].expand(-1, 1, p.shape[-1]))
        found.next_token = found.next_token[:, 0].argmax(-1)
        return found


@pytest.mark.parametrize("rule", [Matching, Twin])
def test_samples_beside_others_follow_the_model(coder_pipe, rule):
    engine = BatchEngine(coder_pipe, Limits(rows=16, waiting=2000))
    engine.rows.parts = (*engine.rows.parts[:2], rule())
    said = Answers(engine)
    sampled = dict(max_new_tokens=2, temperature=1.0, top_k=4)
    for i in range(500):
        said.ask(prompt=TEXTS[0], options=dict(sampled, seed=10_000 + 7 * i))
        if i % 4 == 0:
            said.ask(prompt=TEXTS[i % 6], options=dict(max_new_tokens=5))
    said.wait()
    drawn = [said.tokens(i) for i in range(len(said.told))]
    pairs = [ids for ids in drawn if len(ids) == 2]
    ids = coder_pipe.encode(TEXTS[0])[0]

    def best(more):
        with torch.inference_mode():
            scores = coder_pipe.model(torch.tensor([ids + more])).logits[0, -1].topk(4)
        return scores.indices.tolist(), scores.values.softmax(-1)

    firsts, chances = best([])
    names, probs = [], []
    for first, chance in zip(firsts, chances, strict=True):
        seconds, after = best([first])
        names += [[first, second] for second in seconds]
        probs.append(chance * after)
    p = p_value(torch.cat(probs), torch.tensor([names.index(pair) for pair in pairs]))
    assert p > 1e-3 if rule is Matching else p < 1e-6
    engine.close()


@pytest.mark.parametrize("method", ["ar", "block"])
def test_what_was_read_is_not_read_again(method, coder_pipe, choosing):
    engine = open_engine("pocket/coder", Limits(rows=3), method=method)
    said = Answers(engine)
    long = TEXTS[3] * 5
    said.ask(prompt=long, options=dict(max_new_tokens=40))
    said.wait()
    ids = coder_pipe.encode(long)[0]
    goes_on = [*ids, *said.tokens(0)]
    asked = [
        [*goes_on, 5],
        [*goes_on[:-20], 7, 7],
        [*ids[:20], *coder_pipe.encode(TEXTS[0])[0]],
        ids,
    ]
    for text in asked:
        said.ask(prompt=text, options=dict(max_new_tokens=20))
    said.wait()
    cached = [said.end(i).cached for i in range(5)]
    known = len(goes_on) - 1  # the last token is never read
    if method == "block":  # which has not read the last round's states
        known -= 16
    assert cached[1] >= known // 16 * 16
    assert cached[2:] == [n // 16 * 16 for n in (len(goes_on) - 20, 20, len(ids) - 1)]
    for i, one in enumerate(asked, 1):
        given = coder_pipe.options(dict(max_new_tokens=20))
        target, prompt = VLMTarget(coder_pipe.model, given.processor), coder_pipe.read([one], given)
        steps = decode_plain(target, prompt, 20, Uniforms.from_seeds([0]))
        *_, end = steps
        assert said.tokens(i) == end.row(0).tolist()
    assert engine.counts()["cached_tokens_total"] == sum(cached)
    engine.close()


def test_a_picture_is_looked_at_once(choosing):
    pipe = specmm.VQAPipeline.from_pretrained("pocket/llava", torch_dtype=torch.float32)
    engine = open_engine("pocket/llava", Limits(rows=3))
    said = Answers(engine)

    def asks(shown, words):
        parts = [{"type": "image", "image": picture(shown)}, {"type": "text", "text": words}]
        return {"role": "user", "content": parts}

    long = "What is this, what is beside it, and what is above or below both of them?"
    first = [asks(1, long)]
    said.ask(messages=first, options=dict(max_new_tokens=20))
    said.wait()
    more = [{"role": "assistant", "content": said.text(0)}, {"role": "user", "content": "Why?"}]
    chats = [
        [*first, *more],
        [asks(2, "What is this, what is beside it, and what is above or below both of them?")],
        first,
    ]
    for chat in chats:
        said.ask(messages=chat, options=dict(max_new_tokens=20))
    said.wait()
    cached = [said.end(i).cached for i in range(4)]
    assert cached[1] >= said.end(0).prompt_tokens - 16 and cached[2] == 0 and cached[3] >= 64
    for i, chat in enumerate(chats, 1):
        assert said.text(i) == pipe(messages=chat, method="ar", max_new_tokens=20).answers[0]
    engine.close()


def test_what_other_weights_read_is_not_taken_over():
    """Not by later requests, and not where the weights change while it is answered."""
    pipe = specmm.TextPipeline.from_pretrained("pocket/coder", torch_dtype=torch.float32)
    engine = BatchEngine(pipe, Limits(rows=2))
    long, options = TEXTS[3] * 9, dict(max_new_tokens=40)

    def change():
        with turns_of(pipe.model).take(), torch.no_grad():
            pipe.model.get_input_embeddings().weight[7:9] += 0.5

    def asked(text, during=lambda: None):
        said = Answers(engine)
        said.ask(prompt=text, options=options)
        while not said.told[0]:
            pass
        during()
        return said.wait()

    asked(long)
    assert asked(long).end(0).cached
    change()
    said = asked(long)
    assert not said.end(0).cached
    assert said.text(0) == pipe(long, method="ar", **options).texts[0]
    short = pipe.encode(TEXTS[0])[0][:9]  # of less than a page
    later = [*short, *asked(short, change).tokens(0)]
    assert not asked(later).end(0).cached
    assert asked(later).end(0).cached
    engine.close()
