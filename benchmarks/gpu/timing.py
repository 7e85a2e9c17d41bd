"""Times of captured calls: the kernel inside a CUDA graph, with caches too large for L2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPLAYS = 12
COLD = 512 * 2**20  # bytes that one replay goes through, so that L2 holds none of the next call's


def measure(fn: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median seconds of ``fn()`` over ``repeats`` calls, after ``warmup`` calls that do not count.

    A GPU in use is waited for.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}"
        )
    on_gpu: bool = torch.cuda.is_initialized()
    for _ in range(warmup):
        fn()
    seconds = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


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
