"""Arithmetic of the benchmark of answers and texts: cut answers, the right baseline, equal ones."""

import pytest
import torch

from benchmarks.language_speed import Answered, Asked, Runner, cut, row
from specmm.core.stats import Stats

ASKED = Asked(([None], ["?"]), 0, {})


def runner(name, ids, seconds, stats=None):
    made = Runner(name, lambda asked: Answered([torch.tensor(ids)], stats, "exact"))
    made.once(ASKED)
    made.seconds = [seconds]
    return made


def test_an_answer_ends_after_its_first_end_token():
    assert cut(torch.tensor([5, 6, 2, 0, 0]), [2]).tolist() == [5, 6, 2]
    assert cut(torch.tensor([5, 6]), [2]).tolist() == [5, 6]


def test_the_baseline_is_the_faster_plain_one():
    plain = Stats(tokens=10, rounds=10, batch_rounds=10, seconds=1.0, verify_seconds=0.9)
    seconds = dict(seconds=0.5, draft_seconds=0.1, verify_seconds=0.3)
    drafted = Stats(tokens=10, rounds=4, batch_rounds=4, kept=[2, 2], **seconds)
    runners = [
        runner("generate", [4, 2], 0.3),
        runner("ar", [4, 2], 0.2, plain),
        runner("msd", [4, 3], 0.1, drafted),
    ]
    found = [row(r, runners, "describe", 0.0, 1) for r in runners]
    assert [f["baseline"] for f in found] == [False, True, False]
    assert [f["speedup"] for f in found] == pytest.approx([2 / 3, 1.0, 2.0])
    assert [f["token_equal"] for f in found] == [1.0, 1.0, 0.0], "an answer that differs is seen"
    assert found[2]["tau"] == 2.5 and found[2]["accepted_by_position"] == [0.5]
    assert found[2]["host_overhead"] == pytest.approx(0.2)
