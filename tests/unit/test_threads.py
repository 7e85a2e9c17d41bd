"""The threads of products: named, measured and remembered; kept by what must be made again."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import specmm
from specmm.choose import threads
from specmm.choose.threads import Products, allowed, choose, chosen, in_use, look_again, settled
from specmm.core.turns import turns_of

Seconds = Callable[[int], float]


@pytest.fixture
def network(monkeypatch, tmp_path) -> nn.Module:
    """Four cores, which nobody has said to use, and a network of two products."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SPECMM_PROGRAMS", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    monkeypatch.setattr(threads, "_quota", lambda: math.inf)
    torch.set_num_threads(4)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.fixture
def machine(monkeypatch) -> Callable[..., list[int]]:
    """Sets the seconds of a pass by its number of threads, and how many times those of the
    processor they are; gives the passes that were made.
    """
    passes: list[int] = []

    clock = [0.0]
    monkeypatch.setattr(threads.time, "thread_time", lambda: clock[0])

    def seconds_are(seconds: Seconds, waited: float = 1.0) -> list[int]:
        def passed(products: Products, count: int) -> float:
            passes.append(count)
            clock[0] += seconds(count) / waited
            return seconds(count)

        monkeypatch.setattr(Products, "_pass", passed)
        return passes

    return seconds_are


def test_the_fastest_is_taken_within_a_call_alone(network, machine) -> None:
    machine(lambda count: abs(count - 2) + 1.0)
    with turns_of(network).take():
        assert torch.get_num_threads() == 2
        with turns_of(network).take():
            assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4


def test_a_single_thread_is_not_looked_at(network, machine) -> None:
    passes = machine(float)
    torch.set_num_threads(1)
    with chosen(network):
        look_again()
    assert passes == []


def test_a_thread_that_begins_meanwhile_has_as_many_to_choose_from(network, machine) -> None:
    other, found = nn.Linear(2, 2), []

    def call() -> None:
        machine(lambda count: 1.0 / count)
        with chosen(other):
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    machine(lambda count: float(count))
    with chosen(network):
        assert torch.get_num_threads() == 1
        beside = threading.Thread(target=call)
        beside.start()
        beside.join()
    assert found == [4, 4]


def test_one_is_taken_unless_more_are_clearly_faster(network, machine) -> None:
    machine(lambda count: 1.0 - 0.01 * count)
    assert choose(network).count == 1


@pytest.mark.parametrize(("waited", "taken"), [(1.0, 2), (2.0, 1)])
def test_on_a_busy_machine_more_threads_must_gain_more(network, machine, waited, taken) -> None:
    machine(lambda count: {1: 1.0, 2: 0.75, 4: 0.9}[count], waited)
    assert choose(network).count == taken


def test_a_real_pass_takes_the_networks_own_layers(network) -> None:
    seen = []
    network[1].register_forward_hook(lambda *_: seen.append("hook"))
    products = Products.of(network, rows=3)
    assert products.layers == list(network) and products._pass(2) > 0
    assert torch.get_num_threads() == 2 and not seen


def test_what_was_measured_is_remembered_by_the_next_process(network, machine, tmp_path) -> None:
    passes = machine(lambda count: 1.0 / count)
    assert choose(network).count == 4
    threads._products.clear()
    passes.clear()
    assert choose(network).count == 4
    assert set(passes) == {4}, "looked at, and not measured"
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["threads"] == 4
    for text in ("{", json.dumps(json.loads(file.read_text()) | {"at": 0.0})):  # damaged, and old
        file.write_text(text)
        threads._products.clear()
        passes.clear()
        assert choose(network).count == 4 and set(passes) == {1, 2, 4}


@pytest.mark.parametrize("factor", [10.0, 0.01])
def test_what_has_become_slower_or_faster_is_measured_anew(network, machine, factor) -> None:
    machine(lambda count: 1.0 / count)
    with chosen(network):
        assert torch.get_num_threads() == 4
        machine(lambda count: factor * count)
        look_again()
        assert torch.get_num_threads() == 4, "not at every round"
        threads._products[network].due = 0.0
        look_again()
        assert torch.get_num_threads() == 1


def test_programs_keep_the_threads_they_were_built_for(network, machine) -> None:
    machine(lambda count: 1.0 / count)
    with chosen(network):
        threads.keep_threads()
        machine(lambda count: float(count))
        threads._products[network].due = 0.0
        look_again()
        assert torch.get_num_threads() == 4
    with chosen(network):
        assert torch.get_num_threads() == 4


def test_whoever_names_a_number_gets_it(network, machine, monkeypatch) -> None:
    passes = machine(lambda count: 1.0 / count)
    with specmm.threads(3), chosen(network):
        assert torch.get_num_threads() == 3 == in_use().count
        look_again()
    assert torch.get_num_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    with chosen(network):
        assert in_use().as_dict() == {"threads": 4, "threads_reason": "OMP_NUM_THREADS says so"}
    assert not passes


@pytest.mark.parametrize("count", [0, 1000, -1, True, "2", 1.5])
def test_numbers_that_cannot_be_are_refused(network, count) -> None:
    match = r"specmm.threads must be a whole number from 1 to 4"
    with pytest.raises(ValueError, match=match), specmm.threads(count):
        pass
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("text", ["abc", "0", "-2", "1.5"])
def test_an_environment_that_openmp_ignores_is_told(network, monkeypatch, text) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS must be a whole number .* got '{text}'"):
        choose(network)


def test_a_container_with_half_a_core_has_one_thread(network, monkeypatch, tmp_path) -> None:
    monkeypatch.undo()
    torch.set_num_threads(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    for text, most in {"50000 100000": 1, "150000 100000": 2, "max 100000": 2}.items():
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(threads, "Path", lambda _: tmp_path / "cpu.max")
        assert allowed() == most


def test_what_is_made_again_takes_the_threads_recorded(network, machine) -> None:
    machine(lambda count: 1.0 / count)
    with settled(network) as choice:
        assert choice.count == 4 == torch.get_num_threads()
        machine(lambda count: float(count))
        with chosen(network):
            assert torch.get_num_threads() == 4, "to the end"
    with settled(network, recorded=3):
        assert torch.get_num_threads() == 3
    refused = pytest.raises(ValueError, match="continue with its 3 threads, got 2")
    with specmm.threads(2), refused, settled(network, recorded=3):
        pass
    assert torch.get_num_threads() == 4


def test_a_network_without_products_of_a_cpu_takes_pytorchs_own() -> None:
    assert choose(nn.Embedding(3, 3)).reason == "PyTorch's own" or in_use().count == 1


def test_a_quantisers_weights_are_not_timed():
    class Packed(nn.Parameter):
        """As torchao's, which know few operators."""

    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    network[0].weight = Packed(torch.zeros(8, 8))
    assert Products.of(network, 4).layers == [network[1]]
