"""Answers of text and pictures in turn, by a tiny Chameleon: what its class's own generate writes
once its pictures are not hidden and a plain grammar says what may come.
"""

import itertools

import pytest
import torch
import transformers as tf
from PIL import Image

import specmm
from specmm import methods
from specmm.choose.contest import Sample
from specmm.core.decode import decode, decode_plain
from specmm.core.drafter import Feedback
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.hf.answers import choosing_drawn
from specmm.hf.drafters.drafting import assemble
from specmm.hf.drafters.interleaved import InterleavedDrafter
from specmm.hf.pictures.interleaved import InterleavedTarget
from specmm.hf.pictures.picture_tokens import token_codes
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.shape.trees import branching
from specmm.text.pipeline import TextPipeline
from specmm.verify import Recursive
from specmm.verify.exhaustive import draws, emitted_probs, sequence_probs, total_variation
from tests import sampling
from tests.commands import as_json
from tests.noisy import noisy
from tests.tiny import chameleon, parts
from tests.tiny.chameleon import IDS, PICTURE, SIDE

T = SIDE**2
END = IDS["<eoss>"]
BEGIN = IDS[chameleon.BEGIN]
COUNT = 70
ASKED = ["blue tree", "tree on a hill", "a red barn"]
METHODS = {"ar": "ar", "prompt-lookup": "prompt-lookup", "sjd": methods.AnswerSJD(window=5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("anole")
    chameleon.save_writer(place)
    return place


@pytest.fixture(scope="module")
def pipe(folder):
    return specmm.VQAPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def may_follow(ids, left, sizes):
    """What may come after ``ids`` where ``left`` tokens may, in plain words."""
    begin, end, length, pictures, vocabulary = sizes
    opened = max((i for i, token in enumerate(ids) if token == begin), default=None)
    if opened is None or end in ids[opened:]:
        shut = [*pictures, *([begin] if left < length + 2 else [])]
        return [i for i in range(vocabulary) if i not in shut]
    return list(pictures) if len(ids) - opened - 1 < length else [end]


SIZES = (BEGIN, END, T, PICTURE, chameleon.TEXT["vocab_size"])


def own_answer(pipe, monkeypatch, text, picture=None, count=COUNT):
    """By the class's own generate, whose mask of pictures is emptied."""
    model = pipe.model
    token_codes(model)
    monkeypatch.setitem(model.model.vocabulary_mapping.__dict__, "image_tokens", [])
    shown = None if picture is None else [picture]
    inputs = pipe.processor(images=shown, text=[text], return_tensors="pt")
    width = inputs["input_ids"].shape[1]

    def allowed(_, ids):
        return may_follow(ids.tolist(), count - (len(ids) - width), SIZES)

    given = dict(do_sample=False, max_new_tokens=count, prefix_allowed_tokens_fn=allowed)
    found = model.generate(**inputs, **given)[0, width:]
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_greedy_answers_are_the_classes_own(pipe, method, monkeypatch):
    """Alone, after a picture, and in a batch of several lengths."""
    given = dict(max_new_tokens=COUNT, method=METHODS[method], draw=True)
    picture = noisy((16, 16), 60)
    wanted = [own_answer(pipe, monkeypatch, text) for text in ASKED]
    assert sum(any(i in PICTURE for i in ids.tolist()) for ids in wanted) == 2
    out = pipe([None] * len(ASKED), ASKED, **given)
    assert all(torch.equal(*pair) for pair in zip(out.tokens, wanted, strict=True))
    assert out.certificate.kind == "exact"
    seen = own_answer(pipe, monkeypatch, "<image>" + ASKED[0], picture)
    assert torch.equal(pipe(picture, ASKED[0], **given).tokens[0], seen)
    if method == "sjd":
        assert out.stats.tau > 1.05


@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_answers_of_text_alone_are_the_classes_own(pipe, method):
    """Which hides the tokens of pictures, likely as they may be."""
    inputs = pipe.processor(text=[ASKED[1]], return_tensors="pt")
    found = pipe.model.generate(**inputs, do_sample=False, max_new_tokens=20)
    out = pipe(None, ASKED[1], max_new_tokens=20, method=method)
    assert torch.equal(out.tokens[0], found[0, inputs["input_ids"].shape[1] :])
    assert out.pictures == [] and not set(out.tokens[0].tolist()) & set(PICTURE)


def test_pictures_are_those_of_their_tokens_and_have_a_place_in_the_text(pipe):
    out = pipe([None] * 2, ASKED[:2], max_new_tokens=COUNT, method="sjd", draw=True)
    codes = torch.tensor(PICTURE)
    for ids, text, shown in zip(out.tokens, out.answers, out.pictures, strict=True):
        begins = (ids == BEGIN).nonzero()[:, 0].tolist()
        assert len(shown) == text.count("<image>") == len(begins) > 0
        for place, picture in zip(begins, shown, strict=True):
            grid = torch.searchsorted(codes, ids[place + 1 : place + 1 + T])
            vq = chameleon.vq()
            with torch.no_grad():
                latents = vq.quantize.get_codebook_entry(grid, (1, SIDE, SIDE, 8))
                pixels = vq.decode(latents, force_not_quantize=True).sample[0]
            wanted = (127.5 * pixels + 128).clamp(0, 255).permute(1, 2, 0)
            got = torch.tensor(list(picture.getdata())).view(wanted.shape)
            assert picture.size == (4 * SIDE, 4 * SIDE) and (got - wanted).abs().max() <= 1
        words = text.replace("<image>", " ").split()
        assert words == pipe.text([i for i in ids.tolist() if i not in PICTURE]).split()
    streamed = list(pipe.stream(None, ASKED[0], max_new_tokens=COUNT, method="sjd", draw=True))
    assert "".join(new for [new] in streamed).strip() == out.answers[0]


def test_the_command_line_saves_pictures(folder, pipe, tmp_path):
    words = ["ask", folder, "-q", ASKED[0], "--max-new-tokens", COUNT, "--method", "sjd"]
    record = as_json(*words, "--draw", tmp_path)
    out = pipe(None, ASKED[0], max_new_tokens=COUNT, method="sjd", draw=True)
    assert record["outputs"] == out.answers and len(record["pictures"]) == len(out.pictures[0]) > 0
    for file, picture in zip(record["pictures"], out.pictures[0], strict=True):
        assert Image.open(file).tobytes() == picture.tobytes()


def test_rows_that_begin_anew_are_answers_of_their_own(pipe):
    """A row that ends within words takes the next question, whatever picture it has drawn."""
    given = dict(max_new_tokens=COUNT, draw=True)
    for name in ("prompt-lookup", "sjd"):
        for heat in ({}, {"temperature": 1.0, "seed": [3, 4, 5]}):
            options = given | heat | {"method": METHODS[name]}
            wanted = pipe([None] * 3, ASKED, **options).tokens
            again = pipe([None] * 3, ASKED, batch_size=1, **options).tokens
            assert all(torch.equal(*pair) for pair in zip(wanted, again, strict=True)), name


def test_auto_races_what_serves_such_answers(pipe):
    """And answers as plain decoding does, greedy, whatever it takes; streams, too."""
    given = dict(max_new_tokens=COUNT, draw=True)
    alone = specmm.VQAPipeline(pipe.model, pipe.processor, folder=pipe.drafters.folder)
    out = alone(None, ASKED[0], method="auto", **given)
    assert out.method.startswith("auto: ") and "of it in pictures" in out.method
    assert "sjd" in out.method and "prompt-lookup" in out.method and "x" in out.method
    own = pipe(None, ASKED[0], **given)
    assert torch.equal(out.tokens[0], own.tokens[0])
    assert [p.tobytes() for p in out.pictures[0]] == [p.tobytes() for p in own.pictures[0]]
    assert out.certificate.kind == "exact" and len(alone.drawn.records) == 1
    streamed = list(alone.stream(None, ASKED[0], method="auto", **given))
    assert "".join(new for [new] in streamed).strip() == out.answers[0]


def test_auto_weighs_words_and_pictures_by_what_is_answered(pipe, monkeypatch):
    """By what fits before the first answer, then by the answers; here one method is twice as fast
    within pictures and half as fast among words.
    """
    alone = specmm.VQAPipeline(pipe.model, pipe.processor, folder=pipe.drafters.folder)
    ran = []

    class Clocked(choosing_drawn.Record):
        def choose(self, begin, *_):
            tried = [one.method for one in self.order]
            ran.append([[*begin(method)][-1].tokens[0].tolist() for method in tried])
            for method, each in zip(tried, [1.0, 1.0, 2.0 if len(ran) == 1 else 0.5], strict=True):
                self.samples[method] = [Sample(1.0, [each], 1.0)]

    def chosen(room):
        return alone.planned(None, ASKED[0], max_new_tokens=room, draw=True).partition(" (")

    monkeypatch.setattr(choosing_drawn, "Record", Clocked)
    assert chosen(COUNT)[0] == "auto: ar", "3% is noise"
    assert chosen(T + 2)[0].startswith("auto: sjd")
    assert f"{T / (T + 2):.0%} of it in pictures" in chosen(T + 2)[2]
    words, pictures = ran
    assert len(words) == len(pictures) == 3 and all(len(row) >= T for row in words + pictures)
    assert not any({*row} & {*PICTURE, BEGIN} for row in words)
    grammar = InterleavedTarget(pipe.model, Processor(0)).grammar
    begins = [bool(each.masks[0, BEGIN]) for each in (grammar, grammar.of_words())]
    assert begins == [True, False], "however fond of pictures a model is"
    assert all({*row[:T]} <= {*PICTURE} for row in pictures)
    out = alone(None, ASKED[2], max_new_tokens=COUNT, draw=True)
    assert not out.pictures[0], "it has words alone"
    assert chosen(T + 2)[0] == "auto: ar" and "0% of it in pictures" in chosen(T + 2)[2]
    alone(None, ASKED[0], max_new_tokens=COUNT, draw=True)
    known = alone.drawn
    assert known.tokens > COUNT and known.drawn % T == 0 and known.drawn > 0
    assert len(ran) == 2, "speeds are measured once"


def test_what_does_not_fit_is_said(pipe):
    def refused(said, **options):
        with pytest.raises(ValueError, match=said):
            pipe(None, "tree", **{"max_new_tokens": COUNT, "draw": True} | options)

    refused(f"max_new_tokens must be at least {T + 2} for answers with", max_new_tokens=T + 1)
    refused("draw=True needs a method of ar, prompt-lookup, sjd, auto, got 'block'", method="block")
    refused("method 'sjd' must be AnswerSJD here, got SJD", method=methods.SJD())
    refused("give draw=True to a model that writes", method="sjd", draw=False)
    ids = {"input_ids": torch.tensor([[1, BEGIN, PICTURE[0]]])}
    with pytest.raises(ValueError, match="ends after 1 tokens of one"):
        InterleavedTarget(pipe.model, Processor(0)).prefill(VLMPrompt(ids, COUNT), 2)


def test_models_that_write_text_alone_are_refused(pipe):
    words = tf.LlamaForCausalLM(tf.LlamaConfig(**TINY))
    words_pipe = TextPipeline(words, pipe.tokenizer)
    with pytest.raises(ValueError, match="draw=True is for VQAPipeline"):
        words_pipe("a red barn", draw=True, max_new_tokens=4)
    with pytest.raises(ValueError, match="needs a model that writes text and pictures in turn"):
        InterleavedTarget(words, Processor(0))
    lumina = chameleon.model(**chameleon.TRAINING)
    with pytest.raises(ValueError, match="got Lumina-mGPT, which draws alone"):
        InterleavedTarget(lumina, Processor(0))


TINY = parts.SIZES | dict(num_hidden_layers=1, vocab_size=64)

# a model of eight tokens, two of them of pictures of 2 x 2
MARKS = {"<image>": 0, chameleon.BEGIN: 2, "<eoss>": 3}
SMALL = (2, 3, 4, [6, 7], 8)
V = 8
ROWS = 3000
WARM = Processor(2.0)
LENGTH = 7  # a picture, its end and a word


def small_model(dtype=torch.float32):
    names = {chameleon.image_name(i): id_ for i, id_ in enumerate(SMALL[3])}
    vq = chameleon.VQ | dict(resolution=8, num_embeddings=2)
    sizes = chameleon.TEXT | dict(vocab_size=V, eos_token_id=1, pad_token_id=0)
    config = tf.ChameleonConfig(vocabulary_map=MARKS | names, vq_config=vq, **sizes)
    return chameleon.loud(config).to(dtype)


PROMPTS = {"in a picture": [1, 4, 5, 4, 5, 2], "in text": [4, 5, 4, 4, 5, 4]}


@torch.no_grad()
def table(model, prompt, paths, left):
    """Probabilities [P, V] after ``prompt`` and each of ``paths``, without a cache."""
    rows = torch.tensor([[*prompt, *path] for path in paths])
    states = model.model(rows, use_cache=False).last_hidden_state[:, -1]
    logits = model.lm_head(states).double()
    for row, ids in zip(logits, rows.tolist(), strict=True):
        shut = [i for i in range(V) if i not in may_follow(ids, left, SMALL)]
        row[shut] = -torch.inf
    return WARM(logits)


def tables(model, prompt, root, depths, left):
    """Of the next ``depths`` tokens [V^d, V] each, after a ``root``."""
    paths = [list(itertools.product(range(V), repeat=depth)) for depth in range(depths)]
    return [
        table(model, [*prompt, *root], each, left - depth - len(root))
        for depth, each in enumerate(paths)
    ]


@pytest.mark.parametrize(("prompt", "root"), [("in a picture", 6), ("in text", 2), ("in text", 4)])
@torch.inference_mode()
def test_nodes_of_a_tree_know_where_they_are(prompt, root):
    """Every path of two, in float64, against forwards of the whole text."""
    model = small_model(torch.float64)
    target = InterleavedTarget(model, WARM)
    ids = PROMPTS[prompt]
    target.prefill(VLMPrompt(padded([ids]), 8), V * V + V + 1)
    shape = branching([V, V])
    first = torch.arange(V)
    tree = DraftTree(torch.cat([torch.tensor([root]), first, first.repeat(V)])[None], shape)
    probs = target.score(tree).probs[0].double()
    wanted = tables(model, ids, [root], 3, 8)
    found = probs.split([1, V, V * V])
    for ours, theirs in zip(found, wanted, strict=True):
        assert 0.5 * (ours - theirs).abs().sum(-1).max() < 1e-12


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_every_draw_together_is_the_targets_distribution(prompt):
    """With what the drafter records in a row of text, where it looks up, and of a picture."""
    model = small_model(torch.float64)
    target = InterleavedTarget(model, WARM)
    drafter = InterleavedDrafter(target, 2)
    ids = PROMPTS[prompt]
    root = 6 if prompt == "in a picture" else 4
    output = target.prefill(VLMPrompt(padded([ids]), 8), 3)
    feedback = Feedback(output, torch.tensor([root]))
    drafter.begin(feedback, Clock())
    tree = drafter.propose(feedback, Uniforms.from_seeds([0]))
    looked_up = prompt == "in text"
    assert bool((tree.probs[0, 1:].max(-1).values == 1).all()) is looked_up
    q = [tree.probs[0, 1][None].double(), tree.probs[0, 2].double().expand(V, -1)]
    p = tables(model, ids, [root], 3, 8)
    wanted = sequence_probs(p, 3)
    drawn = draws(TreeShape.chain(2), q, "independent")
    assert total_variation(emitted_probs(Recursive(), drawn, p), wanted) < 1e-12
    other = torch.full_like(drawn.tree.probs, 1 / V)  # a twin that records something else
    drawn.tree = DraftTree(drawn.tree.tokens, drawn.tree.shape, other)
    assert total_variation(emitted_probs(Recursive(), drawn, p), wanted) > 1e-3


@torch.inference_mode()
def test_a_row_that_begins_anew_is_where_its_prompt_ends():
    """A row that was in text takes over a prompt that ends with what begins a picture."""
    target = InterleavedTarget(small_model(), WARM)
    target.prefill(VLMPrompt(padded([PROMPTS["in text"]]), 8), 3)
    target.start_row(0, VLMPrompt(padded([PROMPTS["in a picture"]]), 8))
    tree = DraftTree(torch.tensor([[6, 7, 6]]), TreeShape.chain(2))
    assert target.score(tree).probs[0].sum(0).nonzero()[:, 0].tolist() == SMALL[3]


def colder(drafter):
    """A broken twin: Jacobi drafts come from colder distributions than are recorded."""
    propose = drafter.jacobi.propose

    def proposed(feedback, uniforms):
        tree = propose(feedback, uniforms)
        cold = (tree.probs[:, 1:] + 1e-9).log().mul(4).softmax(-1)
        tokens = torch.multinomial(cold.flatten(0, 1), 1).view(len(cold), -1)
        return DraftTree(torch.cat([tree.tokens[:, :1], tokens], 1), tree.shape, tree.probs)

    drafter.jacobi.propose = proposed


def drawn_up(drafter):
    """A broken twin: what is looked up is recorded as drawn by Jacobi's distributions."""
    propose = drafter.propose

    def proposed(feedback, uniforms):
        kept = []
        inner = drafter.jacobi.propose

        def keep(*given):
            kept.append(inner(*given))
            return kept[0]

        drafter.jacobi.propose = keep
        tree = propose(feedback, uniforms)
        drafter.jacobi.propose = inner
        return DraftTree(tree.tokens, tree.shape, kept[0].probs)

    drafter.propose = proposed


def p_value(prompt, method, break_it=None):
    """Of the first tokens of many answers, against their exact probabilities."""
    model = small_model()
    target = InterleavedTarget(model, WARM)
    ids = PROMPTS[prompt]
    length = LENGTH if prompt == "in a picture" else 3
    given = VLMPrompt(padded([ids] * ROWS), LENGTH)
    made = methods.AnswerSJD(window=3) if method == "sjd" else methods.make(methods.VQA, method)
    parts = None if method == "ar" else assemble(made, target)
    if break_it is not None:
        break_it(parts[0])
    stream = sampling.Stream(ROWS, 1)
    torch.manual_seed(0)
    if parts is None:
        *_, end = decode_plain(target, given, length, stream)
    else:
        *_, end = decode(target, *parts, given, length, stream)
    probs = {(): 1.0}
    for step in range(length):
        paths = list(probs)
        after = table(model, ids, paths, LENGTH - step)
        probs = {
            (*path, token): probs[path] * float(row[token])
            for path, row in zip(paths, after, strict=True)
            for token in row.nonzero()[:, 0].tolist()
        }
    numbers = {path: i for i, path in enumerate(probs)}
    drawn = torch.tensor([numbers[tuple(row)] for row in end.tokens[:, :length].tolist()])
    return sampling.p_value(torch.tensor(list(probs.values())), drawn)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "sjd"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_samples_follow_the_models_distribution(prompt, method):
    assert p_value(prompt, method) > 1e-3


@pytest.mark.slow
def test_samples_of_broken_drafters_do_not():
    assert p_value("in a picture", "sjd", colder) < 1e-6
    assert p_value("in text", "sjd", drawn_up) < 1e-6
