"""Whether the kernels compile for GPUs that are not here: ``python -m benchmarks.gpu.compiles``.

Every launch is made as decoding makes it, on tensors without memory, and stops where Triton's own
compiler and assembler have built the kernel and it fits the GPU's shared memory. Needs no GPU;
``TRITON_INTERPRET`` must not be set. Speed and races only a GPU shows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import Mock, patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from specmm.kernels.acceptance.triton import accept
from specmm.kernels.kv_commit.triton import kv_commit
from specmm.kernels.top_k import MOST
from specmm.kernels.top_k.triton import kth_largest
from specmm.kernels.tree_attention import TreeMask
from specmm.kernels.tree_attention.triton import tree_attention

KIB = 1024
TARGETS = {  # and the shared memory of a program
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KIB),
    "sm_86": (GPUTarget("cuda", 86, 32), 99 * KIB),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KIB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KIB),
}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attention() -> Iterator[tuple[str, Callable[[], object]]]:
    """Tree attention of each precision, with and without hidden slots, over split prefixes."""
    lengths = empty(2, dtype=torch.int64)
    dtypes, widths = (torch.float16, torch.bfloat16, torch.float32), (24, 80, 128, 256)
    for dtype, width, nodes in product(dtypes, widths, (1, 65)):
        q, keys = empty(2, 8, nodes, width, dtype=dtype), empty(2, 2, 4096, width, dtype=dtype)
        words = empty(1, nodes, -(-nodes // 64), dtype=torch.int64)
        hidden = empty(2, 300, dtype=torch.bool) if width == 80 else None
        mask = TreeMask(words, lengths, 4000, hidden)
        given = q, keys, keys, mask, width**-0.5, 4
        yield f"attention {dtype} D={width} T={nodes}", lambda g=given: tree_attention(*g)


def acceptance() -> Iterator[tuple[str, Callable[[], object]]]:
    """Fused acceptance of drawn and chosen drafts from either end, and of the likeliest."""
    tokens = empty(2, 26, dtype=torch.int64)
    probs = empty(2, 26, 4096)
    tree = probs, tokens, tokens[:1], empty(2, 27), 26
    for drafts, leaves_first in product((None, probs), (False, True)):
        given = (*tree, drafts, leaves_first, False)
        name = f"acceptance drawn={drafts is not None} {leaves_first=}"
        yield name, lambda g=given: accept(*g)
    yield "acceptance greedy", lambda: accept(*tree, None, False, True)


def commits() -> Iterator[tuple[str, Callable[[], object]]]:
    """KV commit of each precision."""
    path, kept = empty(2, 7, dtype=torch.int64), empty(2, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        data = empty(8, 2, 300, 6, 80, dtype=dtype)
        yield f"commit {dtype}", lambda d=data: kv_commit(d, path, kept, kept, 280)


def filters() -> Iterator[tuple[str, Callable[[], object]]]:
    """The k-th largest of rows, up to the most that a program holds."""
    for width in (1000, 16_384, MOST):
        yield f"top-k V={width}", lambda w=width: kth_largest(empty(2, w), 50)


@contextmanager
def compiling_for(target: GPUTarget, shared: int) -> Iterator[list[Any]]:
    """Launches only compile, for ``target`` of ``shared`` bytes; gives the list of what was
    compiled.
    """
    built: list[Any] = []
    launch = JITFunction.run

    def build(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        built.append(launch(kernel, *arguments, grid=grid, warmup=True, **options))

    there = Mock(get_current_target=lambda: target, get_current_device=lambda: str(target))
    with (
        patch.object(JITFunction, "run", build),
        patch.object(type(triton.runtime.driver), "active", there),
        patch("specmm.kernels.tree_attention.triton.shared_memory", lambda _: shared),
    ):
        yield built


def taken(launch: Callable[[], object], target: GPUTarget, shared: int) -> int:
    """Bytes of shared memory that the kernels of ``launch`` take; raises what Triton raises, or
    ``ValueError``.
    """
    with compiling_for(target, shared) as built:
        launch()
    most = max(int(kernel.metadata.shared) for kernel in built)
    if most > shared:
        raise ValueError(f"it takes {most} bytes of shared memory, of {shared}")
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the kernels; the first that does not compile is named and ends it."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.compiles", description="Kernels compiled without a GPU"
    )
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all if not given")
    parser.add_argument("--each", type=int, default=1, help="compile each n-th kernel only")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        print("TRITON_INTERPRET is set, so nothing would be compiled: unset it", file=sys.stderr)
        return 2
    for name in options.targets or TARGETS:
        for what, launch in [*attention(), *acceptance(), *commits(), *filters()][:: options.each]:
            try:
                most = taken(launch, *TARGETS[name])
            except Exception as error:
                print(f"{name}: {what} does not compile: {error}", file=sys.stderr)
                return 1
            print(f"{name}: {what}: {most / KIB:.1f} KiB of shared memory", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
