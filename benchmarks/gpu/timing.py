"""Times of captured calls: the kernel inside a CUDA graph, with caches too large for L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from specmm.autotune import measure

REPLAYS = 12
COLD = 512 * 2**20  # bytes that one replay goes through, so that L2 holds none of the next call's


def copies_of(size: int) -> int:
    """How many inputs of ``size`` bytes a replay needs to be cold."""
    return max(2, min(32, COLD // max(size, 1)))


def milliseconds(calls: Sequence[Callable[[], object]], on_gpu: bool = True) -> float:
    """Median time of one of ``calls``, captured together and replayed; no host in between.

    Without a GPU they are merely called, one after the other.
    """
    if not on_gpu:
        return 1000 * statistics.median(measure(call, repeats=1, warmup=1) for call in calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:  # compiles, and warms up
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 2):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times[2:])
