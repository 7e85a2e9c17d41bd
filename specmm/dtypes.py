"""Which dtype a model is fastest in on this machine."""

from __future__ import annotations

import torch

from specmm.registry import unknown

NAMES = ("auto", "float32", "bfloat16", "float16")
LARGE = 50_000_000  # parameters: their float32 weights no longer stay in a processor's caches


def choose_dtype(parameters: int = 0) -> torch.dtype:
    """The dtype a step is fastest in here, for a model of so many ``parameters``.

    On a CPU bfloat16 pays once a step is bound by reading the weights; below that its matrix kernels cost more a call
    than float32's (pocket/llamagen on two cores with AMX: 4.9 ms a step against 2.9 ms).
    """
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    large = parameters >= LARGE and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if large else torch.float32


def named_dtype(name: str) -> torch.dtype | None:
    """The dtype called ``name``, None for "auto"; raises ``ValueError`` with a suggestion for others."""
    if name not in NAMES:
        raise unknown("dtype", name, NAMES)
    return None if name == "auto" else getattr(torch, name)
