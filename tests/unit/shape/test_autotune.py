import time

import pytest

from specmm.autotune import Costs, lookup, measure, plan
from specmm.shape.static import branching
from specmm.tree import TreeShape

CHEAP = Costs(
    draft={1: 0.0005, 5: 0.0025}, verify={1: 0.004, 5: 0.0045, 26: 0.006, 60: 0.0086}, step=0.004, host=0.0003
)
CANDIDATES = [TreeShape.chain(4), branching([4, 2, 1, 1, 1]), branching([2, 1])]


def test_takes_the_candidate_with_the_largest_speedup():
    chosen = plan(CHEAP, [0.6, 0.2, 0.05, 0.02], CANDIDATES)
    speedups = {c.size: plan(CHEAP, [0.6, 0.2, 0.05, 0.02], [c], margin=0).expected_speedup for c in CANDIDATES}
    assert chosen.shape is not None
    assert chosen.expected_speedup == max(speedups.values())
    assert chosen.expected_tau > chosen.expected_speedup
    assert f"{chosen.shape.size} nodes" in chosen.reason


def test_speedup_by_hand():
    chosen = plan(Costs({1: 0.1, 2: 0.2}, {3: 1.0}, step=1.0, host=0.05), [0.8], [TreeShape.chain(2)])
    assert chosen.expected_tau == pytest.approx(2.44)
    assert chosen.expected_speedup == pytest.approx(2.44 / 1.25)


def test_falls_back_when_speculation_would_lose():
    chosen = plan(CHEAP, [0.05], CANDIDATES)
    assert chosen.shape is None
    assert chosen.expected_tau == chosen.expected_speedup == 1.0
    assert "plain decoding" in chosen.reason


def test_falls_back_within_the_margin():
    costs = Costs(draft={1: 0.0}, verify={2: 1.0}, step=1.0)
    chain = [TreeShape.chain(1)]
    assert plan(costs, [0.04], chain).shape is None
    assert plan(costs, [0.06], chain).shape is chain[0]
    assert plan(costs, [0.04], chain, margin=0.0).shape is chain[0]
    assert plan(costs, [0.0], chain, margin=0.0).shape is None  # a tie is not a gain


def test_falls_back_without_candidates():
    assert plan(CHEAP, [0.9], []).shape is None


def test_expensive_host_turns_speculation_off():
    slow = Costs(CHEAP.draft, CHEAP.verify, CHEAP.step, host=0.05)
    assert plan(slow, [0.6, 0.2], CANDIDATES).shape is None


def test_lookup_between_and_beyond_the_measured_sizes():
    table = {10: 1.0, 20: 2.0, 40: 3.0}
    assert [lookup(table, n) for n in (1, 10, 15, 20, 30, 40, 60)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert lookup({8: 0.5}, 99) == 0.5
    assert lookup({10: 2.0, 20: 1.0}, 100) == 1.0  # noise must not promise that larger is free
    assert lookup(lambda n: 2.0 * n, 3) == 6.0


def test_measure_is_a_median_after_warmup():
    calls = []

    def work():
        calls.append(None)
        time.sleep(0.05 if len(calls) in (1, 4) else 0.001)  # the first call and one outlier are slow

    assert 0.001 <= measure(work, repeats=5, warmup=1) < 0.03
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs({1: 1.0}, {1: 1.0}, step=0.0), "step must be positive"),
        (lambda: Costs({1: 1.0}, {1: 1.0}, step=1.0, host=-1.0), "host must be at least 0"),
        (lambda: lookup({}, 3), "cost table must hold"),
        (lambda: plan(CHEAP, [0.5], CANDIDATES, margin=-0.1), "margin must be"),
        (lambda: measure(lambda: None, repeats=0), "repeats must be"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
