"""Which dtype a model is given where nobody names one."""

from __future__ import annotations

import pytest
import torch

from specmm.loading import hardware
from specmm.loading.hardware import LARGE, choose_dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about processors")
@pytest.mark.parametrize("products, tiles", [(False, False), (True, False), (True, True)])
def test_long_steps_want_tiles_and_few_rows_of_large_weights_products(monkeypatch, products, tiles):
    monkeypatch.setattr(hardware, "bfloat16_products", lambda: products)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert choose_dtype(LARGE) == (torch.bfloat16 if products else torch.float32)
    assert choose_dtype(LARGE, long=True) == (torch.bfloat16 if tiles else torch.float32)
    assert choose_dtype(LARGE - 1) == choose_dtype(LARGE - 1, long=True) == torch.float32


def test_the_dtype_is_of_the_device_a_model_is_put_on(monkeypatch):
    """A GPU nearby changes nothing for a model that stays on the CPU."""
    wanted = [choose_dtype(size, long) for size in (0, LARGE) for long in (False, True)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_dtype(size, long) for size in (0, LARGE) for long in (False, True)] == wanted
    assert choose_dtype() == torch.float32
