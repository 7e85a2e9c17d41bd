"""Calls by the threads that are chosen, and by one and two set by hand, beside busy programs.

    GOMP_SPINCOUNT=1000 python -m benchmarks.threads        # as the command line waits

Quiet, then beside one and three loops that do nothing; all ways in turn, in any order; medians of
whole calls, and of the quotients of the same picture, answer or completion.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import torch
import typer
from PIL import Image

import specmm
from benchmarks.common import RESULTS, Out, Row, environment, write_results

LOADS = (0, 1, 3)  # busy programs
WAYS: dict[str, Callable[[], Any]] = {
    "chosen": nullcontext,
    "one": lambda: specmm.threads(1),
    "two": lambda: specmm.threads(2),
}
PICTURES = (("llamagen", "ar"), ("llamagen", "lantern++"), ("var", "ar"), ("mar", "ar"))
Call = Callable[[int], Any]


def calls() -> dict[str, Call]:
    """A picture, plain and drafted, and of each other family; an answer, a completion."""
    found: dict[str, Call] = {}
    for name, method in PICTURES:
        pipe = specmm.ImagePipeline.from_pretrained(f"pocket/{name}", method=method)
        pipe.set_progress_bar_config(disable=True)
        found[f"{name}, {method}"] = lambda seed, pipe=pipe: pipe(
            classes=[seed % 9], generator=torch.Generator().manual_seed(seed)
        )
    answers = specmm.VQAPipeline.from_pretrained("pocket/llava", method="msd")
    texts = specmm.TextPipeline.from_pretrained("pocket/coder", method="block")
    image = Image.new("RGB", (64, 64), "red")
    found["llava, msd"] = lambda seed: answers(image, "What do you see?", seed=seed)
    found["coder, block"] = lambda seed: texts("def add(a, b):", max_new_tokens=64, seed=seed)
    return found


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Within the block ``count`` programs are busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def main(
    runs: Annotated[int, typer.Option(min=1, help="Of each call.")] = 7, out: Out = RESULTS
) -> None:
    """Measure all calls and write the table."""
    rows: list[Row] = []
    made = calls()
    for load in LOADS:
        with beside(load):
            for label, call in made.items():
                seconds: dict[str, list[float]] = {way: [] for way in WAYS}
                for run in range(runs + 1):  # the first is not counted
                    for way in random.sample(list(WAYS), len(WAYS)):  # each after each
                        with WAYS[way]():
                            start = time.perf_counter()
                            call(run)
                            seconds[way].append(time.perf_counter() - start)
                middle = {way: statistics.median(each[1:]) for way, each in seconds.items()}
                best = seconds[min("one", "two", key=lambda way: middle[way])]
                pairs = zip(seconds["chosen"][1:], best[1:], strict=True)
                over = statistics.median(chosen / by_hand for chosen, by_hand in pairs)
                row = {"busy programs": load, "call": label, **middle, "over the best": over}
                rows.append(row)
    write_results(out, "threads", rows, environment(runs=runs))


if __name__ == "__main__":
    typer.run(main)
