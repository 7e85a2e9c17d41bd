"""The pocket models' real speed-ups on this device: plain decoding and methods, interleaved.

Modes: eager, and with ``compiled=True`` (graph), each over plain decoding of its own mode.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.common import Row
from benchmarks.gpu.parts import Bench, Case
from specmm.runs.benches import Bench as Contest
from specmm.runs.run import Place
from specmm.vlm.pictures import from_numbers

BATCHES = (1, 8)
CODE = (
    "def add(a, b):\n    return a + b\n\n\ndef",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    print(",
    "import os\n\n\ndef read(path):\n",
)
QUESTION = "Describe the picture."
ANSWERS = "msd,msd(sampled=true, tree=(1, 1, 1, 1, 1, 1)),prompt-lookup"
TOKENS = 64  # of a text or an answer


def mar(bench: Bench) -> Iterator[Case]:
    """pocket/mar."""
    return _cases(bench, "pocket/mar", lambda contest: contest.pictures((), {}))


def coder(bench: Bench) -> Iterator[Case]:
    """pocket/coder, greedy."""
    tokens = 8 if bench.tiny else TOKENS
    return _cases(bench, "pocket/coder", lambda contest: contest.texts(CODE, tokens, 0.0))


def llava(bench: Bench) -> Iterator[Case]:
    """pocket/llava, greedy, about pictures of coloured squares."""
    tokens = 8 if bench.tiny else TOKENS
    asked = [(squares(seed), QUESTION) for seed in range(8)]
    return _cases(bench, "pocket/llava", lambda contest: contest.texts(asked, tokens, 0.0), ANSWERS)


def squares(seed: int) -> Any:
    """A picture [64, 64] of four coloured squares."""
    choose = random.Random(seed)
    colours = [[[choose.randrange(256) for _ in range(3)] for _ in range(2)] for _ in range(2)]
    whole = np.array(colours, dtype=np.uint8).repeat(32, 0).repeat(32, 1)
    return from_numbers(whole)


def _cases(
    bench: Bench, model: str, run: Callable[[Contest], list[Row]], contenders: str | None = None
) -> Iterator[Case]:
    """A case for each batch size; ``contenders`` None: the methods that ``specmm bench`` takes."""

    def measure(batch: int, mode: str) -> list[Row]:
        place = Place(device=bench.device)
        repeats = max(1, bench.repeats // 2)
        graphs = mode == "graph"
        contest = Contest(model, contenders, None, place, batch, repeats, 0, graphs)
        with bench.memory() as memory:
            rows = run(contest)
        if graphs and not rows[0]["compiled"]:  # there is no plain decoding to compare with
            return []
        return [
            _row(row) | {"mode": mode} | memory for row in rows if row["compiled"] or not graphs
        ]

    for batch in BATCHES[:1] if bench.tiny else BATCHES:
        for mode in ("graph", "eager") if bench.on_gpu else ("eager",):
            named = f"batch {batch}, {mode}"
            yield Case(named, lambda batch=batch, mode=mode: measure(batch, mode))


def _row(row: Row) -> Row:
    low, high = row["quartiles"]
    kept = ("model", "batch", "speedup", "tau", "host_overhead", "dtype")
    return {name: row[name] for name in kept} | {
        "method": row["label"],
        "seconds": row["seconds"],
        "repeats": row["runs"],
        "speedup_low": low,
        "speedup_high": high,
        "certificate": row["certificate"]["kind"],
    }
