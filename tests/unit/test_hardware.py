"""What is known of devices: whether a GPU's memory is nearly full."""

import pytest
import torch

from specmm.loading import hardware


@pytest.mark.parametrize(
    ("free", "full", "emptied"), [([50], False, 0), ([10, 50], False, 1), ([10, 10], True, 2)]
)
def test_a_gpu_is_full_when_giving_memory_back_does_not_help(free, full, emptied, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.pop(0), 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    assert hardware.is_nearly_full(torch.device("cuda"), 0.25) == full
    assert len(calls) == emptied and not hardware.is_nearly_full(torch.device("cpu"), 0.25)
