"""Tree attention on the CPU: what a round's path through the library adds to the attention.

``python -m benchmarks.tree_path``. The attention itself is SDPA with a ready mask, once a layer.
The path adds the choice of implementation, the mask of the round and the call of every layer.
Interleaved, one thread; writes ``tree_path.csv``. Shape letters: R rows, H heads, N tree nodes, S
slots, D head width.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common import RESULTS, Row, environment, write_results
from specmm.cache import Cache, CacheSize, alike
from specmm.kernels.tree_attention import TreeMask, attend, tree_attention
from specmm.tree import TreeShape

REPEATS = 25
SIZES = {  # layers, heads, width, branches, capacity, nodes
    "pocket/llamagen, 8 nodes": (18, 4, 32, 2, 145, 8),
    "pocket/llamagen, 26 nodes": (18, 4, 32, 2, 145, 26),
    "LlamaGen-B, 26 nodes": (12, 12, 64, 2, 257, 26),
}


def main(out: Path = RESULTS) -> int:
    """Measure and write."""
    torch.set_num_threads(1)
    rows = [measure(name, *sizes) for name, sizes in SIZES.items()]
    for row in rows:
        print(row)
    write_results(out, "tree_path", rows, environment(repeats=REPEATS))
    return 0


@torch.inference_mode()
def measure(
    name: str, layers: int, heads: int, width: int, branches: int, capacity: int, nodes: int
) -> Row:
    """Milliseconds of a round's attention: bare, by the library's path, and by the operator."""
    size = CacheSize(alike(layers, heads, width), 1, branches, capacity, nodes)
    cache = Cache(size, torch.float32)
    shape = TreeShape.from_parents([-1, *(n // 2 for n in range(nodes - 1))])
    for array in cache.arrays:
        array.normal_()
    cache.lengths += capacity // 2
    q = torch.randn(branches, nodes, heads, width).transpose(1, 2)
    memories = [(m.keys.transpose(1, 2), m.values.transpose(1, 2)) for m in cache.layers]
    ready = cache.tree_bias(shape.ancestors)
    words = TreeMask(shape.ancestor_words, cache.lengths, capacity)

    def bare() -> None:
        for k, v in memories:
            F.scaled_dot_product_attention(q, k, v, attn_mask=ready)

    def path() -> None:
        mask = cache.tree_mask(shape)
        for k, v in memories:
            attend(q, k, v, mask)

    def operator() -> None:
        for k, v in memories:
            tree_attention(q, k, v, words.words, words.lengths, words.first, width**-0.5)

    milliseconds = interleaved({"bare_ms": bare, "path_ms": path, "operator_ms": operator})
    outside = 1 - milliseconds["bare_ms"] / milliseconds["path_ms"]
    return {"case": name, **milliseconds, "path_outside_attention": outside}


def interleaved(runs: dict[str, Callable[[], None]]) -> Row:
    """Median milliseconds of CPU time of each of ``runs``, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS + 5):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(found[5:]) for name, found in times.items()}


if __name__ == "__main__":
    sys.exit(main())
