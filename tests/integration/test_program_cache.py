"""Programs are kept from process to process; a folder of them that fails does not end a run."""

import json

import pytest
import torch

from specmm import methods
from specmm.choose import when_compiled
from specmm.programs import program_cache
from specmm.programs.compiled import compiled, uncompiled_calls
from tests.forks import said_by
from tests.integration.conftest import tiny_pipeline
from tests.integration.test_compiled import compiles, draw

SCRIPT = """
from specmm.programs.compiled import compiled, prepare_compiler
from torch._dynamo.utils import counters
from specmm.core.randomness import categorical
prepare_compiler(torch.device("cpu"))
probs, uniforms = torch.full((9, 4), 0.25), torch.linspace(0.05, 0.95, 9)
found = compiled(categorical)(probs, uniforms)
assert torch.equal(found, categorical(probs, uniforms)), "the program's values"
print(counters["aot_autograd"]["autograd_cache_hit"])
"""
PIPELINES = """
import json
from torch._dynamo.utils import counters
from specmm import ImagePipeline, TextPipeline
pipe = ImagePipeline.from_pretrained(pictures)
made = {}
out = pipe(2, method="sjd", compiled=True, generator=torch.Generator().manual_seed(3))
made["picture"] = out.tokens.tolist()
pipe = TextPipeline.from_pretrained(texts)
out = pipe("def add(a", method="ar", compiled=True, max_new_tokens=12, temperature=0)
made["text"] = out.texts
print(json.dumps([counters["aot_autograd"]["autograd_cache_miss"], made]))
"""


def process(folder, script=SCRIPT, **names):
    """What a process prints that runs ``script`` and has ``folder`` for programs, and how often it
    warned of it.
    """
    out, error = said_by(script, {"SPECMM_PROGRAMS": str(folder)}, **names)
    return out.splitlines()[-1], error.count("are not kept for later runs")


def content(folder):
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.so")}


@pytest.mark.slow
@compiles
def test_the_second_process_loads_what_the_first_built(tmp_path, tiny, text_folder):
    """A function's program, and those of any method: its tokens are those of the first."""
    assert process(tmp_path) == ("0", 0)
    built = content(tmp_path)
    assert built
    assert process(tmp_path) == ("1", 0)
    assert content(tmp_path) == built
    models = dict(pictures=str(tiny), texts=str(text_folder))
    (first, _), (second, _) = (process(tmp_path, PIPELINES, **models) for _ in range(2))
    misses, made = json.loads(first)
    assert misses == len(made), "a program a method"
    assert json.loads(second) == [0, made]
    for file in built:
        file.write_bytes(b"no program")
    assert process(tmp_path)[1] <= 1, "one warning at most"


@pytest.mark.slow
@compiles
def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").touch()
    assert process(tmp_path / "file" / "folder")[1] == 1  # PyTorch's own folder may hold programs


@pytest.mark.slow
def test_a_compiler_that_fails_leaves_the_function_as_it_is():
    """Tried in another folder first."""

    def curve(x):
        return torch.sin(x) + 1

    torch._dynamo.reset()
    program_cache.said.clear()
    program = compiled(curve)
    x = torch.linspace(0, 1, 10)
    with (
        torch._inductor.config.patch(
            {"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}
        ),
        pytest.warns(UserWarning) as said,
    ):
        assert torch.equal(program(x), curve(x))
    texts = [str(one.message) for one in said]
    assert sum("are not kept for later runs" in text for text in texts) == 1
    assert sum("runs uncompiled, since compiling failed" in text for text in texts) == 1
    assert torch.equal(program(x + 1), curve(x + 1))


def test_calls_past_the_most_programs_count_as_uncompiled(traced):
    def halved(x):
        return x / 2

    run, before = compiled(halved), uncompiled_calls()
    with torch._dynamo.config.patch(recompile_limit=1):
        for size, calls in ((4, 0), (8, 1), (4, 1), (9, 2)):
            assert torch.equal(run(torch.ones(size)), torch.ones(size) / 2)
            assert uncompiled_calls() - before == calls


def test_what_ends_a_program_midway_is_built_in_parts(traced_in_parts):
    def halved(x):
        torch._dynamo.graph_break()
        return x / 2

    before = uncompiled_calls()
    assert torch.equal(compiled(halved)(torch.ones(4)), torch.ones(4) / 2)
    assert uncompiled_calls() == before


def test_errors_of_what_is_computed_are_told(traced_in_parts):
    def refuse(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        compiled(refuse)(torch.ones(1))


@pytest.mark.parametrize("kind", [OSError, ImportError])
def test_errors_of_files_that_are_read_by_what_is_computed_are_told(traced_in_parts, kind):
    """Which runs once, and not again after each error as for a program that is not there."""
    ran = []

    def refuse(x):
        ran.append(x)
        raise kind("no such file")

    with pytest.raises(kind, match="no such file"):
        compiled(torch.compiler.disable(refuse))(torch.ones(1))
    assert len(ran) == 1

    def around(x):
        return torch.compiler.disable(refuse)(x + 1)

    with pytest.raises(kind, match="no such file"):
        compiled(around)(torch.ones(1))
    assert len(ran) == 2


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_pictures_are_compiled_once_it_pays(kept, traced, monkeypatch):
    """The first call is timed, the second pays where compiling takes no time."""
    pipe = tiny_pipeline(tokens=16)
    found = [draw(pipe, methods.AR(), 1.0, "auto")]
    (work,) = pipe.works.all.values()
    assert work.seconds.plain and not work.ready
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    found.append(draw(pipe, methods.AR(), 1.0, "auto"))
    assert work.ready and work.seconds.build
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert found[0].compiled == [False] * 3
    assert found[1].compiled == [True, True, False], "one is too few for the program of two"
    draw(pipe, methods.AR(), 1.5, "auto")
    assert len(pipe.works.all) == 2, "other guidance is other work"


@pytest.mark.slow
def test_programs_that_others_took_the_place_of_are_paid_again(kept, traced, monkeypatch):
    """A pipeline holds the programs of one guidance; what is drawn after a change is no picture's
    usual time.
    """
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    pipe = tiny_pipeline(tokens=16)

    def drawn(cfg):
        """The guidance whose programs there are after a call."""
        draw(pipe, methods.AR(), cfg, "auto")
        return pipe.parts.made["static of"][0].scale

    draw(pipe, methods.AR(), 1.0, "auto")
    assert drawn(1.0) == 1.0
    (first,) = pipe.works.all.values()
    draw(pipe, methods.AR(), 1.5, "auto")
    assert first.ready and drawn(1.5) == 1.5
    assert not first.ready and first.seconds.load is None and first.tried == 0
    first.seconds.build = 0.0  # so that loading costs nothing
    assert drawn(1.0) == 1.0 and first.seconds.load and first.tried == 0
    draw(pipe, methods.AR(), 1.5, True)
    assert not first.ready
    first.seconds.load = 1e9
    assert [drawn(1.0) for _ in range(3)] == [1.5] * 3, "not worth another change"


def test_what_cannot_be_compiled_is_drawn_as_it_is(kept, traced, monkeypatch):
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    monkeypatch.setattr(methods.SJD, "static_shapes", False)
    pipe = tiny_pipeline(tokens=16)
    method = methods.SJD(window=4)
    for _ in range(2):
        draw(pipe, method, 1.0, "auto")
    (work,) = pipe.works.all.values()
    assert not work.able and not work.ready
    with pytest.raises(ValueError, match="compiled=True needs"):
        draw(pipe, method, 1.0, True)
    with pytest.raises(ValueError, match=r'^compiled must be True, False or "auto", got .yes.$'):
        draw(pipe, method, 1.0, "yes")


@pytest.mark.filterwarnings("ignore:compiled programs are not kept")
def test_pictures_drawn_without_the_programs_that_were_asked_for_say_so(unbuilt, monkeypatch):
    """Their seconds are not taken for a program's."""
    monkeypatch.setattr(when_compiled, "BUILD", 0.0)
    pipe = tiny_pipeline(tokens=16)
    with pytest.warns(UserWarning, match="compiling failed: RuntimeError: no room"):
        assert draw(pipe, methods.AR(), 1.0, True).compiled == [False] * 3
    for _ in range(2):
        assert draw(pipe, methods.AR(), 1.0, "auto").compiled == [False] * 3
    (work,) = pipe.works.all.values()
    assert not work.able and work.seconds.quick is None and work.seconds.build is None
