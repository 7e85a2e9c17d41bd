"""Which dtype a model is fastest in on this machine, and which devices it has."""

from __future__ import annotations

import torch

from specmm.registry import unknown

NAMES = ("auto", "float32", "bfloat16", "float16")
LARGE = 50_000_000  # parameters: their float32 weights no longer stay in a processor's caches


def choose_dtype(
    parameters: int = 0, long: bool = False, device: torch.device | str = "cpu"
) -> torch.dtype:
    """The dtype a step is fastest in here, for a model of so many ``parameters``; ``long``: of
    hundreds of rows a step.

    ``device`` is where the model is put, not where it might be: pipelines stay on the CPU until
    they are moved. GPUs that have no bfloat16 get float32: float16 must be asked for, since models
    trained in bfloat16 may overflow in it.

    On a CPU bfloat16 pays once a step is bound by reading the weights; below that its matrix
    kernels cost more a call than float32's (pocket/llamagen on two cores with AMX: 4.9 ms a step
    against 2.9 ms). Long steps are bound by arithmetic, which AMX alone makes faster: a Xeon whose
    AMX is hidden has bfloat16 products, but from 16 rows on they take 1.3 to 1.7 times as long as
    float32's (1024 x 4096), and VAR-d16 4.1 s a picture in place of 3.3.
    """
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if gpu_has_bfloat16() else torch.float32
    kernels = bfloat16_products() and (not long or torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if kernels and parameters >= LARGE else torch.float32


def bfloat16_products() -> bool:
    """Whether this processor multiplies in bfloat16, and oneDNN uses it: ``ONEDNN_MAX_CPU_ISA`` may
    hide it.
    """
    mkldnn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(mkldnn and torch.cpu._is_avx512_bf16_supported())


def gpu_has_bfloat16() -> bool:
    """Whether the current GPU computes in bfloat16; others emulate it, slower than float32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def named_dtype(name: str) -> torch.dtype | None:
    """The dtype called ``name``, None for "auto"; raises ``ValueError`` with a suggestion for
    others.
    """
    if name not in NAMES:
        raise unknown("dtype", name, NAMES)
    return None if name == "auto" else getattr(torch, name)


def named_device(name: str) -> torch.device:
    """The device called ``name``; raises ``ValueError`` for one that this machine has not, or has
    no driver for.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be one of this machine's, such as cpu, got {name!r}"
        ) from error
    return device
