"""Batches of the shipped models: an item's bits do not depend on what it is batched with (float32,
CPU).

Greedy decoding hides most rounding; samplers at their default temperature do not.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from specmm.choose.threads import settled
from specmm.image_ar.pipeline import open_pictures
from specmm.jobs.folder import Spec
from specmm.jobs.items import Item, seed_of
from specmm.jobs.workers import ImageWorker
from specmm.programs.batch_invariant import batch_invariant

NAMES = ("heart", "face-smiling", "heart", "time", "country-flag")
CASES = [
    ("pocket/llamagen", "speculative", 1),
    ("pocket/llamagen", "sjd", 1),
    ("pocket/var", "code", 2),
    ("pocket/mar", "cspd", 1),
]


def pixels(worker: ImageWorker, items: Sequence[Item]) -> list[bytes]:
    return [found.image.tobytes() for found in worker.run(items)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method", "threads"), CASES)
def test_pictures_are_bit_equal_across_batch_sizes(model: str, method: str, threads: int) -> None:
    """The items of each of some batches have the bits that they have in the first."""
    options = ("n=4",) if method == "code" else ()  # else it takes what is fastest, as no job may
    worker = ImageWorker(Spec(model, method, options, dtype="float32"))
    worker.pipe.set_progress_bar_config(disable=True)
    if model == "pocket/mar":  # every head step makes the same products: fewer of them show as much
        worker.pipe.settings = dataclasses.replace(worker.pipe.settings, head_steps="ddim12")
    items = [Item(f"e/{i}", "class", NAMES[i % len(NAMES)], seed_of(f"e/{i}", 0)) for i in range(6)]
    with settled(worker.network, threads):  # as a job does
        whole = pixels(worker, items)
        for some in (slice(1, 2), slice(2, 6)):
            assert pixels(worker, items[some]) == whole[some]
    assert len(set(whole)) > len(whole) // 2


def test_windows_do_not_depend_on_the_rows_beside_them() -> None:
    """MAR's windows are shorter where all rows are near their chains' ends: in tokens, of which
    pixels hide the last digits.
    """
    pipe = open_pictures("pocket/mar", "cspd", {"dtype": torch.float32}, "alone")
    pipe.set_progress_bar_config(disable=True)
    given = dict(num_iter=6, head_steps="ddim40", output_type="latent")
    torch.set_num_threads(1)
    with batch_invariant():
        whole = pipe(classes=[0, 1, 2, 3], seed=5, batch_size=4, **given).tokens
        alone = [pipe(classes=[i], seed=5 + i, **given).tokens for i in range(4)]
    assert torch.equal(torch.cat(alone), whole)
