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
CASES = [
    ("pocket/llamagen", "ar"),
    ("pocket/llamagen", "speculative"),
    ("pocket/llamagen", "lantern++"),
    ("pocket/llamagen", "sjd"),
    ("pocket/var", "ar"),
    ("pocket/var", "speculative"),
    ("pocket/mar", "ar"),
    ("pocket/mar", "cspd"),
]
TWO_THREADS = [  # slow beside another test process: threads wait for one another
    pytest.param(*case, 2, marks=pytest.mark.slow)
    for case in (
        ("pocket/llamagen", "speculative"),
        ("pocket/var", "speculative"),
        ("pocket/mar", "ar"),
    )
]


def pixels(worker: ImageWorker, items: Sequence[Item], size: int) -> list[bytes]:
    batches = [items[i : i + size] for i in range(0, len(items), size)]
    return [found.image.tobytes() for batch in batches for found in worker.run(batch)]


@pytest.mark.parametrize(
    ("model", "method", "threads"), [(*case, 1) for case in CASES] + TWO_THREADS
)
def test_pictures_are_bit_equal_across_batch_sizes(model: str, method: str, threads: int) -> None:
    worker = ImageWorker(Spec(model, method, dtype="float32"))
    worker.pipe.set_progress_bar_config(disable=True)
    if model == "pocket/mar":  # every head step makes the same products: fewer of them show as much
        worker.pipe.settings = dataclasses.replace(worker.pipe.settings, head_steps="12")
    items = [Item(f"e/{i}", "class", NAMES[i % len(NAMES)], seed_of(f"e/{i}", 0)) for i in range(8)]
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = pixels(worker, items, 8)
        assert pixels(worker, items[:3], 3) == whole[:3]
        assert pixels(worker, items[1:2], 1) == whole[1:2]
        assert pixels(worker, items[4:], 4) == whole[4:]
    finally:
        torch.set_num_threads(kept)
    assert len(set(whole)) > 4
