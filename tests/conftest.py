"""What must be said before torch is imported: the interpreter of kernels where there is no GPU, and the threads.

Tests run in two processes (``make test``): with one thread each they do not wait for one another.
"""

import functools
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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
