"""Kernels are tested through Triton's interpreter where there is no GPU; Triton reads the variable when imported."""

import functools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def traced(monkeypatch):
    """Programs are traced as for a compiler, and not built: seconds instead of half a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
