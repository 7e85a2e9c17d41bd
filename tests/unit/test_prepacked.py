"""Weights laid out for a CPU: the same values under the same names, and the same products up to
rounding.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from specmm.core.derived import one_call
from specmm.loading.hardware import PackedLinear, bfloat16_products, prepack, product


@pytest.fixture(autouse=True)
def call():
    """Copies are used within a call."""
    with one_call():
        yield


PACKS = pytest.mark.skipif(
    not bfloat16_products(), reason="needs a processor with bfloat16 products"
)


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 96), nn.GELU(approximate="tanh"), nn.Linear(96, 24, bias=False)
    ).to(dtype)


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 2, 17, 100])
def test_products_are_the_same_up_to_rounding(dtype, near, rows):
    plain, laid = network(dtype), prepack(network(dtype))
    x = torch.randn(2, rows, 24, generator=torch.Generator().manual_seed(rows)).to(dtype)
    with torch.inference_mode():
        wanted, found = plain.double()(x.double()), laid(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=near, rtol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_shapes_and_values_stay(dtype):
    plain, laid = network(dtype).state_dict(), prepack(network(dtype)).state_dict()
    assert list(plain) == list(laid)
    assert all(torch.equal(plain[name], laid[name]) for name in plain)


def test_float32_lies_column_by_column():
    wide, narrow = prepack(network(torch.float32))[0::2]
    assert wide.weight.stride() == (1, 96) and narrow.weight.stride() == (1, 24)
    assert prepack(nn.Linear(1024, 1024)).weight.stride() == (1024, 1), (
        "large ones are left as they are"
    )


@PACKS
def test_bfloat16_is_held_twice_and_follows_its_layer():
    laid = prepack(network(torch.bfloat16))
    x = torch.ones(1, 24)
    assert isinstance(laid[0], PackedLinear)
    assert laid[0].current(x.bfloat16(), gelu=False) is not None
    assert laid.float()[0].current(x, gelu=False) is None, "another dtype has no copy"
    assert laid.bfloat16()[0].current(x.bfloat16(), gelu=False) is not None


def test_networks_of_long_inputs_hold_float32_twice_and_use_it_by_tokens_not_rows(monkeypatch):
    laid = prepack(network(torch.float32), long=True)
    assert isinstance(laid[0], PackedLinear) and laid[0].weight.stride() == (1, 96)
    used = lambda *shape: laid[2].current(torch.zeros(*shape, 96), gelu=False) is not None  # noqa: E731
    assert used(1, 64) and used(32, 64) and not used(1, 63) and not used(32, 16) and not used()
    assert laid[0].current(torch.zeros(1, 2, 24), gelu=True) is not None, (
        "a GELU is applied in the cache at any length"
    )
    x = torch.randn(4, 64, 24, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert all(torch.equal(laid(x)[i : i + 1], laid(x[i : i + 1])) for i in range(4))
        monkeypatch.setattr("specmm.loading.hardware.LONG", 65)
        torch.testing.assert_close(
            laid(x), prepack(network(torch.float32))(x), atol=1e-6, rtol=1e-6
        )


@PACKS
def test_inputs_of_another_dtype_are_treated_as_by_any_layer():
    laid, x = prepack(network(torch.bfloat16)), torch.ones(3, 24)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="dtype"):
        laid(x)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert laid(x).dtype == torch.bfloat16


@PACKS
def test_a_packed_layer_learns_and_is_copied():
    laid = prepack(network(torch.bfloat16))
    twin, x = copy.deepcopy(laid), torch.randn(3, 24).bfloat16()
    laid(x).float().sum().backward()
    assert laid[0].weight.grad is not None and bool(laid[0].weight.grad.abs().sum() > 0)
    with torch.inference_mode():
        assert torch.equal(twin(x), laid(x))


@PACKS
def test_a_network_too_large_to_be_held_twice_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr("specmm.loading.hardware.MOST", 24 * 96)
    assert type(prepack(network(torch.bfloat16))[0]) is nn.Linear


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_product_takes_another_bias_and_a_gelu(dtype, near, packed):
    layer, bias = (
        network(dtype)[0],
        torch.randn(96, generator=torch.Generator().manual_seed(1)).to(dtype),
    )
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = nn.functional.linear(x.double(), layer.weight.double(), bias.double())
    with torch.inference_mode():
        laid = prepack(layer) if packed else layer
        for gelu in (False, True):
            found = product(laid, x, bias, gelu)
            exact = nn.functional.gelu(wanted, approximate="tanh") if gelu else wanted
            torch.testing.assert_close(found.double(), exact, atol=4 * near, rtol=near)


def test_a_compiler_gets_plain_operators():
    layer = torch.nn.Linear(32, 16, bias=False).bfloat16()
    network = prepack(torch.nn.Sequential(layer))
    graphs = []

    def keep(graph, inputs):
        graphs.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        torch.compile(network, backend=keep, fullgraph=True)(torch.randn(3, 32).bfloat16())
    assert not any("mkldnn" in str(target) for target in graphs)
