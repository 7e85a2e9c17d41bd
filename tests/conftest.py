"""Kernels are tested through Triton's interpreter where there is no GPU; Triton reads the variable when imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
