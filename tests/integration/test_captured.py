"""Steps and rounds as graphs: the tokens of eager ones, replayed from the same memory."""

import copy
import gc
import warnings
import weakref

import pytest
import torch

from benchmarks.gpu.pocket import squares
from specmm import methods
from specmm.core.decode import decode
from specmm.core.randomness import Uniforms
from specmm.hf.answers import shared_rounds
from specmm.image_ar.tokens.assemble import assemble as assemble_pictures
from specmm.image_ar.tokens.drafters.jacobi import JacobiDrafter
from specmm.image_ar.tokens.target import Prompt, StaticTarget
from specmm.programs.graphs import round_program
from specmm.text.pipeline import TextPipeline
from specmm.vlm.pipeline import VQAPipeline
from tests.cases import some
from tests.commands import run
from tests.integration import test_compiled_pictures as pictures
from tests.integration.conftest import tiny_pipeline
from tests.integration.test_compiled import OPTIONS, same
from tests.tiny.picture_kinds import KINDS, opened
from tests.unit.diffusion import test_compiled_text as texts

CPU = torch.device("cpu")


@pytest.fixture
def coder(text_folder):
    """A tiny language model of one's own, whose weights and graphs a test may change."""
    return TextPipeline.from_pretrained(text_folder, torch_dtype=torch.float32)


@pytest.fixture
def strict():
    """What is played as it is would be a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_eager_rounds(name, taped, strict):
    pipe = tiny_pipeline(tokens=16)
    for _ in range(2):
        found = same(pipe, *OPTIONS[name])
    assert taped.replays > taped.records > 0
    assert (found.certificate.tv or 0) > 0 or not name.startswith("lantern")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ar", "sjd"])
def test_models_of_transformers_that_draw(name, tmp_path, taped, strict):
    KINDS["janus"].save(tmp_path)
    pipe = opened(tmp_path)
    method = pictures.METHODS[name]
    for prompts in pictures.BATCHES:
        eager, found = (
            pictures.draw(pipe, KINDS["janus"], prompts, method, way) for way in (False, True)
        )
        assert torch.equal(found.tokens, eager.tokens)
    assert taped.replays > taped.records > 0


@pytest.mark.parametrize("name", some(["chain", "tree"], ["chain"]))
def test_texts(name, taped, strict):
    eager = texts.Run(texts.WAYS[name], texts.PROCESSORS["drawn"], False)
    run = texts.Run(texts.WAYS[name], texts.PROCESSORS["drawn"], True)
    run.options = {"play": round_program(CPU)}
    for rows in (texts.ROWS, texts.ROWS[::-1]):
        assert run(rows) == eager(rows)
    assert taped.replays > taped.records > 0


@pytest.mark.parametrize(
    ("method", "temperature"), some([("ar", 0), ("msd", 0), ("msd", 0.8)], [("msd", 0)])
)
def test_questions_about_pictures(method, temperature, taped):
    pipe = VQAPipeline.from_pretrained("pocket/llava")
    given = [squares(seed) for seed in range(2)], ["Describe the picture."] * 2
    options = dict(method=method, temperature=temperature, seed=3, max_new_tokens=40)
    plain, found = (pipe(*given, compiled=way, **options) for way in (False, True))
    assert found.answers == plain.answers and found.stats.rounds == plain.stats.rounds
    assert found.compiled and taped.replays and not plain.compiled


@pytest.mark.parametrize(("method", "temperature"), [("ar", 0.8), ("block", 0), ("block", 0.8)])
def test_the_text_pipeline(coder, method, temperature, taped):
    prompts = ["def add(a, b):\n", "class Stack:\n"]
    options = dict(method=method, temperature=temperature, seed=3)
    plain, found, short = (
        coder(prompts, compiled=way, max_new_tokens=tokens, **options)
        for way, tokens in ((False, 96), ("auto", 96), ("auto", 20))
    )
    assert found.texts == plain.texts and found.compiled and taped.replays
    assert not short.compiled, "too few rounds"
    with pytest.raises(ValueError, match="compiled=True on a GPU needs ar, msd, eagle3"):
        coder(prompts, compiled=True, method="diffuspec")


def asked(pipe, compiled, call, **options):
    """Answers of a call: texts of other lengths, or about other pictures, each time."""
    given = ["import os\n\n\ndef read(path):\n"[: 9 + 4 * call]]
    if isinstance(pipe, VQAPipeline):  # two, since a CPU counts the inner nodes of a tree for one
        question = "Describe the picture."
        given = [[squares(call), squares(call + 1)], [question, question[call:]]]
    tokens = 40 + 4 * call
    options |= dict(seed=call) if options.get("temperature") else {}
    out = pipe(*given, compiled=compiled, max_new_tokens=tokens, **options)
    return [ids.tolist() for ids in out.tokens], out.stats.rounds


def taken(pipe, method, temperature, taped, calls):
    options = dict(method=method, temperature=temperature)
    for call in range(calls):
        plain, found = (asked(pipe, way, call, **options) for way in (False, True))
        assert found == plain
    assert taped.records == 1 and taped.replays > 3 * calls
    asked(pipe, True, 0, method=method, temperature=0.5)
    assert taped.records == 2, "of other options"


@pytest.mark.parametrize("method", ["ar", "block"])
def test_later_texts_take_the_graph_over(coder, method, taped, strict):
    taken(coder, method, 0.8, taped, 8)


def test_later_answers_take_the_graph_over(taped, strict):
    taken(VQAPipeline.from_pretrained("pocket/llava"), "msd", 0, taped, 3)


def test_what_a_broken_run_leaves_is_not_read(coder, taped, strict):
    plain = asked(coder, False, 0)
    assert asked(coder, True, 0) == plain
    weight = coder.model.model.layers[0].self_attn.v_proj.weight
    before = weight.detach().clone()
    weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite"):
        asked(coder, True, 1)
    weight.data.copy_(before)
    assert asked(coder, True, 0) == plain and taped.replays


def test_a_call_beside_a_stream_has_memory_of_its_own(coder, taped, strict):
    options = dict(method="block", temperature=0.8, max_new_tokens=48, compiled=True, seed=0)
    wanted, other = (coder(text, **options).texts for text in ("class Stack:\n", "import os\n"))
    first = coder.begin("class Stack:\n", **options)
    steps = iter(first.steps)
    for _ in range(5):
        next(steps)
    assert coder.kept.newest.busy
    beside = coder("import os\n", **options).texts
    *_, end = steps
    assert [first.stops.cut(end.tokens[0, : int(end.counts[0])])] == wanted and beside == other
    assert not coder.kept.newest.busy


def test_what_changes_a_model_beside_its_weights_is_seen(coder, taped, strict):
    """As hooks, and the adapter that is active."""
    layer = coder.model.model.layers[1].mlp

    def same():
        assert asked(coder, True, 0) == asked(coder, False, 0)

    same()
    layer.scales = {"first": 1.0, "second": 0.0}
    layer.active = ["first"]
    hook = layer.register_forward_hook(lambda own, given, out: out * own.scales[own.active[0]])
    same()
    layer.active = ["second"]
    same()
    hook.remove()
    same()
    assert taped.records == 4


def test_memory_follows_the_models_dtype(coder, taped, strict):
    """Also that of another pipeline, which is not told."""
    other = TextPipeline(coder.model, coder.tokenizer)
    asked(other, True, 0)
    coder.to(torch.float64)
    plain, found = (asked(other, way, 0) for way in (False, True))
    assert found == plain and taped.records == 2


def test_runs_that_cannot_be_captured_spoil_no_later_ones(coder, taped, monkeypatch):
    plain = asked(coder, False, 0)
    with pytest.raises(ValueError, match="compiled=True finds only end tokens, got stop"):
        asked(coder, True, 0, stop=["zzz"])
    out = coder("import os\n", compiled="auto", stop=["zzz"], max_new_tokens=64)
    assert not out.compiled

    def broken(function, pool=None):
        raise RuntimeError("cannot be captured")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="cannot be captured"):
        patch.setattr("specmm.programs.graphs.record_on_gpu", broken)
        assert asked(coder, True, 0) == plain
    assert asked(coder, True, 0) == plain and taped.records == 1


def test_runs_too_short_for_a_graph_are_no_failures(coder, taped, strict):
    for _ in range(9):
        coder("x = 1\n", method="ar", compiled=True, max_new_tokens=2)
    assert asked(coder, True, 0, method="ar") == asked(coder, False, 0, method="ar")
    assert taped.records == 1


def test_methods_in_turn_have_graphs_of_their_own(coder, taped, strict):
    for call in range(3):
        for method in ("ar", "block"):
            plain, found = (asked(coder, way, call, method=method) for way in (False, True))
            assert found == plain
    assert taped.records == 2


def test_what_fills_the_memory_frees_other_graphs(coder, taped, strict, monkeypatch):
    """Also a call that takes a graph over, and one without."""
    for compiled, left in ((True, 1), (False, 0)):
        for temperature in (0.5, 0.6, 0.7):
            asked(coder, True, 0, temperature=temperature)
        assert len(coder.kept.found) == 3
        with monkeypatch.context() as patch:
            patch.setattr(shared_rounds, "is_nearly_full", lambda device, share: True)
            asked(coder, compiled, 1, temperature=0.6)
        assert len(coder.kept.found) == left


def test_graphs_of_a_model_that_was_replaced_are_freed(coder, taped, strict):
    for temperature in (0.5, 0.6):
        asked(coder, True, 0, temperature=temperature)
    coder.model = copy.deepcopy(coder.model)
    asked(coder, True, 0, temperature=0.7)
    assert [one.target.model for one in coder.kept.found.values()] == [coder.model]


def test_a_stream_shows_no_tokens_of_logits_that_are_not_finite(coder, taped, strict):
    """A call may be told of them a round later."""
    asked(coder, True, 0)
    shown = {}
    for compiled in (False, True):
        pieces = coder.stream("import os\n", method="ar", compiled=compiled, max_new_tokens=40)
        shown[compiled] = [next(pieces) for _ in range(9)]
        with torch.no_grad():
            before = coder.model.lm_head.weight[3].clone()
            coder.model.lm_head.weight[3] = float("nan")
        with pytest.raises(ValueError, match="finite"):
            next(pieces)
        with torch.no_grad():
            coder.model.lm_head.weight[3] = before
    assert shown[True] == shown[False] and taped.replays


@pytest.mark.parametrize(("full", "kept"), [(False, 2), (True, 1)])
def test_replaced_graphs_are_freed_at_once(coder, full, kept, taped, strict, monkeypatch):
    """The oldest beyond so many, and all but the last where memory is scarce."""
    monkeypatch.setattr(shared_rounds, "is_nearly_full", lambda device, share: full)
    coder.kept.most = 2
    found = []
    gc.disable()
    try:
        for temperature in (0.5, 0.6, 0.7):
            asked(coder, True, 0, temperature=temperature)
            shared = coder.kept.newest
            graph = weakref.ref(shared.play.recorded)
            found.append((graph, weakref.ref(shared.target.cache)))
        gone = [part() is None for pair in found for part in pair]
        assert gone == [True] * (6 - 2 * kept) + [False] * 2 * kept
    finally:
        gc.enable()


@pytest.mark.parametrize("tokens", [2, 24])
def test_samples_that_begin_in_a_row_leave_the_graph_as_it_is(coder, tokens, taped, strict):
    prompts = [f"def f{i}(a):\n" for i in range(10)]
    options = dict(batch_size=2, temperature=0.8, max_new_tokens=tokens, seed=0)
    plain, *found = (coder(prompts, compiled=way, **options).texts for way in (False, True, True))
    assert found == [plain] * 2 and taped.records == 1


def test_another_drafter_is_another_graph(coder, taped, strict):
    options = dict(method="block", temperature=0.8)
    assert asked(coder, True, 0, **options) == asked(coder, False, 0, **options)
    drafter = copy.deepcopy(coder.drafter("block"))
    for weight in drafter.parameters():
        weight.data += 0.02
    other = TextPipeline(coder.model, coder.tokenizer, "block", drafter)
    other.kept = coder.kept
    plain, found = (asked(other, way, 0, **options) for way in (False, True))
    assert plain == found and taped.records == 2


def rounds(play=None):
    """Tokens of two pictures under a relaxed rule, whose rounds use all there is."""
    pipe = tiny_pipeline(tokens=36)
    target = StaticTarget(pipe.target())
    parts = assemble_pictures(methods.Speculative(tree=(2, 1)), target, pipe.parts)
    prompt, uniforms = Prompt(torch.tensor([1, 2])), Uniforms.from_seeds([0, 1])
    kept = []
    for progress in decode(*parts, prompt, 36, uniforms, play=play or round_program(CPU)):
        kept.append(progress.counts.clone())
    return progress.tokens[:, :36].clone(), kept


def pictures_of(pipe, compiled, calls=3, **options):
    """Tokens of calls for other classes and seeds each."""
    found = []
    for call in range(calls):
        generators = [torch.Generator().manual_seed(7 * call + row) for row in range(2)]
        given = {"classes": [call % 3, 2 - call % 3], "generator": generators}
        found.append(pipe(**given, compiled=compiled, output_type="latent", **options).tokens)
    return torch.stack(found)


@pytest.mark.parametrize(
    "name", some(["guided tree", "eagle", "sjd", "lantern++"], ["sjd", "eagle"])
)
def test_calls_share_a_graph(name, taped, strict):
    pipe = tiny_pipeline(tokens=36)
    method, cfg, top_k = OPTIONS[name]
    options = {"method": method, "cfg": cfg, "top_k": top_k}
    calls = 8  # more than a graph has tries
    plain, found = (pictures_of(pipe, way, calls, **options) for way in (False, True))
    assert torch.equal(plain, found) and len(plain.flatten(1).unique(dim=0)) == calls
    assert taped.records == 1
    warm = {**options, "temperature": 0.7}  # another setting is another graph
    assert torch.equal(*(pictures_of(pipe, way, calls=2, **warm) for way in (False, True)))
    assert taped.records == 2
    if name == "eagle":  # on a processor the inner nodes of one picture's tree are counted
        return
    others = {**options, "classes": [0], "output_type": "latent"}  # and so is another batch
    one, other = (
        pipe(generator=torch.Generator().manual_seed(1), compiled=way, **others)
        for way in (False, True)
    )
    assert torch.equal(one.tokens, other.tokens)


def test_the_second_round_of_a_later_run_is_replayed(taped, strict):
    """The first has another form: all others of a later run are replays."""
    pipe = tiny_pipeline(tokens=36)
    target = StaticTarget(pipe.target())
    parts = assemble_pictures(methods.Speculative(tree=(1, 1)), target, pipe.parts)
    play = round_program(CPU)
    for seed in range(3):
        before = taped.replays
        prompt, uniforms = Prompt(torch.tensor([1])), Uniforms.from_seeds([seed])
        *_, end = decode(*parts, prompt, 36, uniforms, play=play)
    assert taped.replays - before == end.stats.batch_rounds - 1


def test_logits_that_are_not_finite_end_a_run(taped):
    pipe = tiny_pipeline(tokens=36)
    target = StaticTarget(pipe.target())
    parts = assemble_pictures(methods.Speculative(tree=(1,)), target, pipe.parts)
    prompt, uniforms = Prompt(torch.tensor([1])), Uniforms.from_seeds([0])
    steps = decode(*parts, prompt, 36, uniforms, play=round_program(CPU))
    for _ in range(5):
        next(steps)
    assert taped.replays
    with torch.no_grad():
        pipe.transformer.output.weight[3] = float("nan")
    next(steps)  # what it found is read when the next one has been told
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity from .* in round"):
        next(steps)


def test_runs_of_the_past_are_not_held(taped):
    """A million pictures do not hold a million drafters."""
    pipe, alive = tiny_pipeline(tokens=16), []

    for _ in range(4):
        pictures_of(pipe, True, 1, method="sjd")
        gc.collect()
        alive.append(sum(isinstance(x, JacobiDrafter) for x in gc.get_objects()))
    assert alive[-1] == alive[2]


def test_asking_for_compiled_rounds_where_there_is_no_gpu_is_a_sentence():
    result = run("ask", "pocket/llava", "-q", "What is it?", "--method", "msd", "--compile")
    assert result.exit_code == 2 and "compiled=True needs ar or" in result.stderr
    assert result.stderr.strip().count("\n") == 0


def test_batches_of_a_call_keep_their_own_tokens(taped):
    pipe = tiny_pipeline(tokens=16)
    method, cfg, top_k = OPTIONS["eagle"]  # whose rows do not begin anew
    options = {"method": method, "cfg": cfg, "top_k": top_k, "batch_size": 2}
    options |= {"classes": [0, 1, 2, 3, 4, 0], "output_type": "latent"}
    seeds = [[torch.Generator().manual_seed(i) for i in range(6)] for _ in range(2)]
    plain, found = (pipe(generator=seeds[way], compiled=way, **options) for way in (False, True))
    assert torch.equal(plain.tokens, found.tokens) and taped.records == 1


@pytest.mark.parametrize("method", ["ar", "sjd"])
def test_other_weights_are_another_graph(method, taped):
    pipe = tiny_pipeline(tokens=16)
    before = pictures_of(pipe, True, 2, method=method)
    output = pipe.transformer.output
    output.weight = torch.nn.Parameter(-output.weight.detach())
    plain, found = (pictures_of(pipe, way, 2, method=method) for way in (False, True))
    assert torch.equal(plain, found) and not torch.equal(before, found)
    assert taped.records == 2
