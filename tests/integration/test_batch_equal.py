"""Batches of the shipped models: an item's bits do not depend on what it is batched with (float32,
CPU).

Greedy decoding hides most rounding; samplers at their default temperature do not.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from specmm.jobs.folder import Spec
from specmm.jobs.items import Item, seed_of
from specmm.jobs.workers import ImageWorker

NAMES = ("heart", "face-smiling", "heart", "time", "country-flag")
CASES = [("pocket/llamagen", "speculative"), ("pocket/var", "speculative"), ("pocket/mar", "cspd")]
WHOLE = [
    *CASES,
    ("pocket/llamagen", "ar"),
    ("pocket/llamagen", "sjd"),
    ("pocket/llamagen", "lantern++"),
    ("pocket/var", "ar"),
    ("pocket/mar", "ar"),
]
TWO_THREADS = [  # slow beside another test process: threads wait for one another
    ("pocket/llamagen", "speculative"),
    ("pocket/var", "speculative"),
    ("pocket/mar", "ar"),
]


def pixels(worker: ImageWorker, items: Sequence[Item]) -> list[bytes]:
    return [found.image.tobytes() for found in worker.run(items)]


def check(model: str, method: str, sizes: Sequence[slice], threads: int = 1) -> None:
    """The items of each of ``sizes`` as a batch have the bits that they have in the first."""
    worker = ImageWorker(Spec(model, method, dtype="float32"))
    worker.pipe.set_progress_bar_config(disable=True)
    if model == "pocket/mar":  # every head step makes the same products: fewer of them show as much
        worker.pipe.settings = dataclasses.replace(worker.pipe.settings, head_steps="ddim12")
    items = [Item(f"e/{i}", "class", NAMES[i % len(NAMES)], seed_of(f"e/{i}", 0)) for i in range(8)]
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = pixels(worker, items[sizes[0]])
        for some in sizes[1:]:
            assert pixels(worker, items[some]) == whole[some]
    finally:
        torch.set_num_threads(kept)
    assert len(set(whole)) > len(whole) // 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), CASES)
def test_pictures_are_bit_equal_across_batch_sizes(model: str, method: str) -> None:
    check(model, method, [slice(0, 3), slice(1, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "threads"),
    [(*case, 1) for case in WHOLE] + [(*case, 2) for case in TWO_THREADS],
)
def test_pictures_are_bit_equal_across_more_batch_sizes(
    model: str, method: str, threads: int
) -> None:
    check(model, method, [slice(0, 8), slice(0, 3), slice(1, 2), slice(4, 8)], threads)
