"""What is kept of a network: computed again when the network is another, looked at once a call."""

import gc
import weakref

import pytest
import torch
from torch import nn

from specmm.core.derived import Derived, fact, form_of, in_a_call, one_call
from specmm.core.turns import Turns
from specmm.loading.hardware import bfloat16_products, prepack

NUMBERS = torch.Generator().manual_seed(0)
SMALL, LARGE = torch.randn(30, generator=NUMBERS), torch.randn(300, 64, generator=NUMBERS)
FEW_BYTES = torch.randn(400, 45, generator=NUMBERS).bfloat16()  # rows of no whole number of words


def counted(tensor):
    made = []
    kept = Derived()

    def now():
        with one_call():
            return kept.of((tensor,), lambda: made.append(1) or tensor.clone())

    return now, made


CHANGES = {
    "one number": lambda x: x[(2,) * x.ndim].fill_(1),
    "two rows exchanged": lambda x: x[:2].copy_(x[:2].flip(0)),
    "columns moved": lambda x: x.copy_(x.roll(8, -1)),
    "a sign": lambda x: x[(-1,) * x.ndim].neg_(),
}


@pytest.mark.parametrize("tensor", [SMALL, LARGE, LARGE.t(), FEW_BYTES, LARGE[:, 1:]])
@pytest.mark.parametrize("change", CHANGES)
def test_numbers_are_seen_to_change_whatever_pytorch_counts(tensor, change):
    tensor = tensor.clone()
    now, made = counted(tensor)
    first = now()
    assert now() is first and len(made) == 1
    CHANGES[change](tensor.data)  # moves no version
    assert torch.equal(now(), tensor) and len(made) == 2


def test_numbers_that_are_none_stay_the_same():
    now, made = counted(torch.full((400, 50), float("nan")))
    assert now() is now() and len(made) == 1


def test_a_call_looks_once():
    weight, kept, seen = LARGE.clone(), Derived(), []
    turns = Turns()

    def look():
        seen.append(float(kept.of((weight,), lambda: weight.sum())))

    def stream():
        for _ in range(2):
            look()
            yield None
            weight.data += 1

    assert not in_a_call()
    list(turns.each(stream()))
    assert seen[0] == seen[1], "turns of a stream are one call"
    with turns.take():
        look()
        assert in_a_call() and seen[2] != seen[0]
        weight.data += 1
        with one_call():
            look()
        assert seen[3] == seen[2]
        weight += 1  # PyTorch counts it
        look()
    assert seen[4] != seen[3] and not in_a_call()


@pytest.mark.skipif(not bfloat16_products(), reason="needs a processor with bfloat16 products")
def test_outside_of_a_call_a_layer_multiplies_by_its_weight():
    layer, x = prepack(nn.Sequential(nn.Linear(64, 64).bfloat16())), torch.ones(2, 64).bfloat16()
    with torch.inference_mode(), one_call():
        before = layer(x)
    layer[0].weight.data *= 2
    with torch.inference_mode():
        wanted = nn.functional.linear(x, layer[0].weight, layer[0].bias)
        assert torch.equal(layer(x), wanted) and not torch.equal(before, wanted)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale, self.tags = 2.0, ["a"]

    def forward(self, x):
        return self.inner(x) * self.scale


def patched(network):
    network.inner.forward = lambda x: -x


def class_patched(network):
    kept = Scaled.forward
    Scaled.forward = lambda self, x: x
    return kept


def hooked_everywhere(network):
    return nn.modules.module.register_module_forward_hook(lambda *call: None)


FORMS = {
    "a hook of all modules": hooked_everywhere,
    "a hook": lambda n: n.inner.register_forward_hook(lambda *call: None),
    "a hook before": lambda n: n.register_forward_pre_hook(lambda *call: None),
    "another forward": patched,
    "another forward of the class": class_patched,
    "another module": lambda n: setattr(n, "inner", nn.Linear(4, 4)),
    "another number": lambda n: setattr(n, "scale", 3.0),
    "another word": lambda n: n.tags.append("b"),
    "another dtype": lambda n: n.double(),
}


@pytest.mark.parametrize("change", FORMS)
def test_facts_are_those_of_one_form(change):
    network, asked = Scaled(), []
    find = lambda: len(asked) or asked.append(1) or 0  # noqa: E731
    assert [fact(network, "x", find) for _ in range(2)] == [0, 0]
    undo = FORMS[change](network)
    try:
        assert [fact(network, "x", find) for _ in range(2)] == [1, 1]
    finally:
        if change == "another forward of the class":
            Scaled.forward = undo
        if change == "a hook of all modules":
            undo.remove()


def test_ours_and_weights_change_no_form():
    network = Scaled()
    before = form_of(network)
    nn.init.zeros_(network.inner.weight)
    network.train()
    ours = lambda *call: None  # noqa: E731
    ours.__module__ = "specmm.somewhere"
    network.inner.register_forward_hook(ours)
    assert form_of(network) == before


def test_what_is_known_lives_no_longer_than_its_network():
    network = Scaled()
    network.call = network.forward  # a cycle, as accelerate's
    fact(network, "x", lambda: 1)
    gone = weakref.ref(network)
    del network
    gc.collect()
    assert gone() is None
