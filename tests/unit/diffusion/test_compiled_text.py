"""Compiled text: the tokens of eager steps and rounds, whatever the prompts' lengths, and what is
not served.
"""

import copy
import shutil

import pytest
import torch
import transformers as tf

from specmm import methods
from specmm.choose import when_compiled
from specmm.core.decode import ROOM, decode, decode_plain
from specmm.core.processors import Processor
from specmm.core.randomness import Uniforms
from specmm.hf.answers.running import check_compiled
from specmm.hf.drafters.drafting import assemble
from specmm.hf.models.static import StaticVLMTarget
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.options import Options
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.programs.compiled import CompiledRound, compiled
from specmm.text.pipeline import TextPipeline
from tests.integration.conftest import save_text
from tests.unit.diffusion.conftest import LENGTH, ROWS, SIZES, V, paired, target_model

CHAIN, TREE = methods.Block(length=3), methods.Block(tree=(-1, 0, 0, 1, 1, 2))
WAYS = {"ar": None, "chain": CHAIN, "tree": TREE}


class Run:
    """A method on a tiny model, compiled or not, which keeps its programs."""

    def __init__(self, method, processor, compiled, model=None):
        kind = StaticVLMTarget if compiled else VLMTarget
        self.target = kind(model or target_model(V), processor, "tiny")
        drafter = paired(V, [4, 1, 2, 7], 0 if method == TREE else 6)  # with a memory along chains
        self.parts = None if method is None else assemble(method, self.target, drafter)
        self.options = {"play": CompiledRound()} if compiled else {}

    def __call__(self, rows=ROWS, length=LENGTH):
        *_, end = self.steps(rows, length)
        return end.tokens[:, :length].tolist(), end.stats.rounds

    def steps(self, rows=ROWS, length=LENGTH):
        prompt = VLMPrompt(padded(rows, "cpu"), length)
        uniforms = Uniforms.from_seeds(range(len(rows)))
        if self.parts is None:
            return decode_plain(self.target, prompt, length, uniforms)
        return decode(self.target, *self.parts, prompt, length, uniforms, **self.options)


PROCESSORS = {
    "greedy": Processor(0),
    "drawn": Processor(1.0, top_k=9),
    "penalised": Processor(0.7, repetition_penalty=1.3),
}


def check_compiled_tokens(name, processor):
    eager, compiled = (Run(WAYS[name], PROCESSORS[processor], way) for way in (False, True))
    for rows in (ROWS, ROWS[::-1]):
        assert compiled(rows) == eager(rows)
    return eager, compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processor"), [("ar", "penalised"), ("chain", "drawn"), ("tree", "penalised")]
)
def test_tokens_are_those_of_eager_rounds_with_every_processor(name, processor, traced):
    """As well where a program is not built after all, since PyTorch has made as many as it may."""
    eager, compiled = check_compiled_tokens(name, processor)
    with torch.compiler.set_stance("force_eager"):
        assert compiled() == eager()
    assert compiled() == eager()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
def test_built_programs_give_the_same_tokens():
    check_compiled_tokens("chain", "greedy")


class Parts:
    """What a program may be asked to look at."""

    def __init__(self, x):
        self.x, self.number, self.flag, self.maybe, self.items = x, 2, True, None, [1.0]


def worked(parts):
    out = parts.x * parts.number + (1 if parts.flag else 0) + len(parts.items)
    return out if parts.maybe is None else out + parts.maybe


@pytest.mark.parametrize(
    "change",
    [
        {"number": 3},
        {"flag": False},
        {"maybe": torch.ones(2)},
        {"items": [1.0, 2.0]},
        {"x": torch.ones(3)},
    ],
)
@pytest.mark.slow
def test_programs_of_the_same_parts_follow_what_may_change(change, traced):
    parts, program = Parts(torch.arange(2.0)), compiled(worked)
    assert torch.equal(program(parts), worked(parts))
    vars(parts).update(change)
    assert torch.equal(program(parts), worked(parts))


@pytest.mark.slow
def test_prompts_of_any_length_share_a_program(traced):
    """Up to the room that texts are given: a longer one gets another program, as do more rows, and
    the same tokens.
    """
    eager, compiled = (Run(None, Processor(1.0), way, roomy_model()) for way in (False, True))
    rows = [[3, 4, 5], [6]]
    compiled(rows)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for longer in ([[3, 4, 5, 6], [8, 7]], [[5] * 40, [9] * 33]):
            assert compiled(longer) == eager(longer)
        assert compiled(rows, LENGTH + 5) == eager(rows, LENGTH + 5)
    for others in ([[3, 4] * (ROOM // 2), [9]], [[8, 7, 6]], rows):
        assert compiled(others) == eager(others)


def roomy_model():
    return target_model(V, room=1024)


@pytest.mark.slow
def test_other_runs_on_the_model_leave_programs_as_they_were(traced):
    """They stop where logits are not finite, too."""
    model = target_model(V)
    first, other = (
        Run(method, Processor(0), True, model) for method in (CHAIN, methods.Block(length=2))
    )
    wanted = Run(CHAIN, Processor(0), False)()
    assert first() == wanted
    assert other()[0] == Run(TREE, Processor(0), False, model)()[0] == wanted[0]
    assert first() == wanted
    steps = first.steps()
    next(steps)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite"):
        list(steps)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (methods.PromptLookup(), {}, "needs ar or a block drafter's chains"),
        (methods.DEER(), {}, "needs ar or a block drafter's chains"),
        (methods.Block(tree=8), {}, r"rounds have equal shapes, got Block"),
        (methods.Block(recall=3), {}, "rounds have equal shapes"),
        (methods.AR(), {"stop": "\n"}, "give no stop or batch_size"),
        (CHAIN, {"batch_size": 1}, "give no stop or batch_size"),
    ],
)
def test_what_is_not_served(method, options, message):
    with pytest.raises(ValueError, match=message):
        check_compiled(method, Options(**options))


def test_models_with_windows_are_not_served():
    config = tf.MistralConfig(vocab_size=V, sliding_window=8, **SIZES)
    with pytest.raises(ValueError, match="needs full attention"):
        StaticVLMTarget(tf.MistralForCausalLM(config), Processor())


@pytest.fixture
def pipe(tmp_path):
    return TextPipeline.from_pretrained(save_text(tmp_path), torch_dtype=torch.float32)


@pytest.mark.slow
def test_a_call_in_the_middle_of_a_compiled_stream_leaves_it_its_cache(pipe, traced):
    options = dict(method="ar", max_new_tokens=8, compiled=True)
    wanted = [pipe(text, **options).texts[0] for text in ("def add(a, b):", "import")]
    first = pipe.stream("def add(a, b):", **options)
    begin = next(first)[0]
    (made,) = pipe.kept.found.values()
    assert made.busy and pipe("import", **options).texts == wanted[1:]
    assert begin + "".join(piece for (piece,) in first) == wanted[0] and not made.busy
    abandoned = pipe.stream("import", **options)
    next(abandoned)
    assert made.busy
    abandoned.close()
    assert not made.busy


@pytest.mark.slow
def test_the_pipeline_keeps_its_programs(pipe, traced):
    options = dict(max_new_tokens=6, compiled=True)
    texts = [
        pipe("def add(a, b):", method="ar", **options).texts,
        pipe("def add(a, b):", max_new_tokens=6).texts,
    ]
    kept = dict(pipe.kept.found)
    assert (
        texts[0] == texts[1] and pipe("import", method="ar", **options) and pipe.kept.found == kept
    )
    with pytest.raises(ValueError, match="rounds have equal shapes"):
        pipe("import", method="deer", **options)
    assert pipe.kept.found == kept


def test_programs_are_those_of_the_drafter_at_hand(pipe):
    options = Options(compiled=True)
    first, again = (pipe.rounds_of(CHAIN, pipe.target(CHAIN, options), options) for _ in range(2))
    assert first is again
    pipe.drafters.given["block"] = copy.copy(pipe.drafter("block"))
    assert pipe.rounds_of(CHAIN, pipe.target(CHAIN, options), options) is not first


def test_methods_in_turn_keep_their_programs(pipe):
    """At most so many, and none of another network."""

    def made(method, temperature=0.0):
        options = Options(temperature=temperature, compiled=True)
        return pipe.rounds_of(method, pipe.target(method, options), options)

    plain, chain = made(methods.AR()), made(CHAIN)
    assert (made(methods.AR()), made(CHAIN)) == (plain, chain)
    for temperature in range(1, 1 + pipe.kept.most):
        made(methods.AR(), temperature)
    assert len(pipe.kept.found) == pipe.kept.most and made(CHAIN) is not chain
    pipe.model.register_forward_hook(lambda layer, given, out: None)
    made(CHAIN)
    assert len(pipe.kept.found) == 1


@pytest.mark.slow
def test_texts_are_compiled_once_it_pays(pipe, traced, monkeypatch, tmp_path):
    """The first call is timed; methods whose rounds differ go on as they are."""
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    options = dict(max_new_tokens=6, compiled="auto")
    texts = []
    for programs in (0, 1):
        out = pipe("def add(a, b):", method="ar", **options)
        texts.append(out.texts)
        assert len(pipe.kept.found) == programs and out.compiled is bool(programs)
    assert texts[0] == texts[1]
    for _ in range(2):
        pipe("import", method="prompt-lookup", **options)
    assert not pipe("import", method="prompt-lookup", **options).compiled
    plain, other = pipe.works.all.values()
    assert plain.ready and plain.able and not (other.ready or other.able)
    with pytest.raises(ValueError, match='compiled must be True, False or "auto", got 1'):
        pipe("import", compiled=1)


@pytest.mark.filterwarnings("ignore:compiled programs are not kept")
def test_texts_made_without_the_programs_that_were_asked_for_say_so(pipe, unbuilt, monkeypatch):
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    options = dict(max_new_tokens=6, method="ar")
    plain = pipe("def add(a, b):", **options)
    with pytest.warns(UserWarning, match="runs uncompiled, since compiling failed"):
        out = pipe("def add(a, b):", compiled=True, **options)
    assert not out.compiled and out.texts == plain.texts
    for _ in range(2):
        assert not pipe("def add(a, b):", compiled="auto", **options).compiled
    (work,) = pipe.works.all.values()
    assert not work.able and work.seconds.quick is None
