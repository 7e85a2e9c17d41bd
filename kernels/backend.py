"""Chooses an operator's implementation: Triton on GPUs that it supports, PyTorch's own operators
elsewhere.

``SPECMM_KERNELS`` overrides the choice: ``auto`` (the default), ``triton`` or ``torch``.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

Backend: TypeAlias = Literal["triton", "torch"]
VARIABLE = "SPECMM_KERNELS"
CHOICES = ("auto", "triton", "torch")


def backend(device: torch.device) -> Backend:
    """The implementation for tensors on ``device``.

    Raises ``ValueError`` when the variable holds anything else, or asks for Triton where it cannot
    run.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, got {choice!r}")
    if choice == "auto":
        return "triton" if device.type == "cuda" and _triton_runs() else "torch"
    if choice == "triton" and device.type != "cuda" and not _interpreted():
        raise ValueError(
            f"{VARIABLE}=triton needs tensors on a GPU, got {device.type}; unset it, or set "
            "TRITON_INTERPRET=1 to test"
        )
    return "triton" if choice == "triton" else "torch"


@cache
def _triton_runs() -> bool:
    """Whether Triton is installed and has a driver for this GPU (NVIDIA's, or AMD's under ROCm)."""
    if find_spec("triton") is None:
        return False
    driver = import_module("triton.runtime").driver
    try:
        return driver.active.get_current_target() is not None
    except RuntimeError:  # Triton knows no driver for it
        return False


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1" and find_spec("triton") is not None
