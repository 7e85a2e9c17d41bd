"""Programs in files are run where they fit, and others built where they do not: never a wrong
answer.
"""

import dataclasses
import functools
import types
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.hooks import RemovableHandle

from specmm import program_cache
from specmm.compiled import compiled, uncompiled_calls
from specmm.fingerprint import Fingerprint
from tests.unit import whole_program_parts as parts_module
from tests.unit.whole_program_parts import Doubled, Parts, Settings, worked

X = torch.arange(4.0)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Programs are traced as for a compiler, not built, and kept in a folder of their own."""
    compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(program_cache, "used", lambda: tmp_path)
    torch._dynamo.reset()
    yield tmp_path / "whole"
    torch._dynamo.reset()


def traced(parts, x=X):
    """How many programs a new process traces for ``parts``, whose answer must be right."""
    counters.clear()
    with torch.no_grad():
        assert torch.equal(compiled(worked)(parts, x), worked(parts, x))
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_kept_program_is_run_and_nothing_traced(kept):
    assert [traced(Parts()) for _ in range(3)] == [1, 0, 0]
    assert len(list(kept.iterdir())) == 1


def hooked(module):
    RemovableHandle.next_id = 10**6  # hooks are known by their numbers, counted in a process
    module.register_forward_hook(parts_module.negated)


CHANGES = {
    "a number": lambda parts: setattr(parts, "number", 3),
    "a list": lambda parts: parts.items.append(1.0),
    "a class": lambda parts: setattr(parts, "step", Doubled()),
    "a setting": lambda parts: setattr(parts, "settings", Settings(0.25)),
    "a closure": lambda parts: setattr(parts, "added", parts_module.adding(2.0)),
    "a network's number": lambda parts: setattr(parts.network, "number", 5.0),
    "a hook": lambda parts: hooked(parts.network.inner),
    "one tensor for two": lambda parts: setattr(parts, "second", parts.first),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_other_parts_have_another_program(name, kept):
    traced(Parts())
    other = Parts()
    CHANGES[name](other)
    assert traced(other) == 1
    again = Parts()
    CHANGES[name](again)
    assert traced(again) == 0
    assert traced(Parts()) == 0


@pytest.mark.slow
def test_other_weights_and_what_nothing_reads_share_a_program(kept):
    traced(Parts())
    other = Parts()
    nn.init.ones_(other.network.inner.weight)
    other.clock.seconds["draft"] = 1.0
    other.calls, other.seen = 9, torch.zeros(5)
    assert other.kept  # what a cached property keeps follows from the rest
    assert traced(other, X + 1) == 0


@pytest.mark.slow
def test_other_shapes_and_states_have_another_program(kept):
    traced(Parts())
    assert traced(Parts(), torch.arange(8.0)) == 1
    assert traced(Parts(), X.double()) == 1
    with torch.inference_mode():
        assert traced(Parts()) == 1
    assert traced(Parts()) == 0


def changed(function):
    """``function`` under its name, of other code."""
    code = function.__code__
    constants = tuple(3.0 if x == 2.0 else x for x in code.co_consts)
    made = types.FunctionType(code.replace(co_consts=constants), function.__globals__)
    made.__qualname__ = function.__qualname__
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (parts_module, "helped", changed(parts_module.helped)),
        (parts_module.Step, "__call__", changed(parts_module.Step.__call__)),
        (parts_module, "CONSTANT", 4.0),
    ],
)
def test_other_code_is_traced_again(place, name, value, kept, monkeypatch):
    traced(Parts())
    with monkeypatch.context() as changes:
        changes.setattr(place, name, value)
        assert traced(Parts()) == 1
        assert traced(Parts()) == 0
    assert traced(Parts()) == 1
    assert len(list(kept.iterdir())) == 1, "in the old one's place"


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    ],
)
def test_a_damaged_file_is_one_warning_and_made_anew(harm, kept):
    program_cache.said.clear()
    traced(Parts())
    (file,) = kept.iterdir()
    file.write_bytes(harm(file.read_bytes()))
    with pytest.warns(UserWarning, match="is damaged") as said:
        assert traced(Parts()) == 1
    assert len(said) == 1
    assert traced(Parts()) == 0


def test_a_full_disk_is_one_warning_and_keeps_nothing(kept, monkeypatch):
    program_cache.said.clear()

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specmm.whole_programs.write_whole", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert traced(Parts()) == 1
    assert traced(Parts()) == 1


def test_calls_past_the_most_programs_count_as_uncompiled(kept, monkeypatch):
    monkeypatch.setattr("specmm.compiled.PROGRAMS", 1)
    run, before = compiled(parts_module.helped), uncompiled_calls()
    for x, calls in ((X, 0), (torch.arange(8.0), 1), (X, 1), (torch.arange(9.0), 2)):
        assert torch.equal(run(x), parts_module.helped(x))
        assert uncompiled_calls() - before == calls


def test_what_ends_a_program_midway_is_not_kept(kept):
    def halved(x):
        torch._dynamo.graph_break()
        return x / 2

    assert torch.equal(compiled(halved)(X), X / 2)
    assert not kept.exists()


def test_nothing_is_kept_without_a_folder(kept, monkeypatch):
    monkeypatch.setattr(program_cache, "used", lambda: None)
    with warnings.catch_warnings(action="error"):
        assert [traced(Parts()) for _ in range(2)] == [1, 1]


@pytest.mark.slow
def test_machines_threads_and_variables_have_programs_of_their_own(kept, monkeypatch):
    traced(Parts())
    for change in (
        lambda: monkeypatch.setattr(program_cache, "machine", lambda: "another"),
        lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 99),
        lambda: monkeypatch.setenv("SPECMM_KERNELS", "reference"),
        lambda: torch._inductor.config.patch({"epilogue_fusion": False}).__enter__(),
    ):
        change()
        assert traced(Parts()) == 1
        assert traced(Parts()) == 0
    torch._inductor.config.epilogue_fusion = True


def test_numbers_of_a_run_are_apart_from_those_of_settings():
    def named(**change):
        parts = Parts()
        vars(parts).update(change)
        found = Fingerprint([], (parts,))
        return found.parts, found.numbers

    assert named() == named()
    assert named(number=3)[0] == named()[0] and named(number=3)[1] != named()[1]
    assert named(settings=dataclasses.replace(Settings(), factor=0.3))[0] != named()[0]


class Telling:
    """Its ``unread`` means something else."""

    def __init__(self, number):
        self.number = number

    unread = property(lambda self: ())


def test_what_only_has_the_name_unread_is_read():
    one, other = (Fingerprint([Telling(number)], ()) for number in (1, 2))
    assert one.parts != other.parts
