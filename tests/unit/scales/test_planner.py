"""The planner's arithmetic against published counts, its fit to measured seconds, and its choice of
N.
"""

import pytest

from specmm.image_ar.scales.planner import (
    Forecast,
    Machine,
    Work,
    Workload,
    choose_n,
    condition_work,
    fit,
    forecast,
    forward_work,
    parameters,
)
from specmm.image_ar.scales.var import VARConfig

D16, D30 = VARConfig(), VARConfig(depth=30, embed_dim=1920, num_heads=30)


@pytest.mark.parametrize(
    ("config", "wanted", "size"),
    [
        (D16, [1.2, 3.7, 7.8, 14, 21, 30, 54, 86, 149, 234], 310e6),
        (D30, [8, 24, 51, 88, 137, 196, 349, 548, 938, 1450], 2010e6),
    ],
)
def test_published_counts(config, wanted, size):
    draw = Workload(1)
    # the release computes it at every scale, and the head of both halves
    again = condition_work(config, draw).flops
    heads = [
        2 * config.schedule.tokens(k) * config.embed_dim * config.vocab_size * (k > 0)
        for k in range(10)
    ]
    found = [(forward_work(config, draw, k, k).flops + again + heads[k]) / 1e9 for k in range(10)]
    assert found == pytest.approx(wanted, rel=0.03)
    assert parameters(config) == pytest.approx(size, rel=0.01)


def test_ideal_speedups():
    found = forecast(D30, D16, Workload(64), Machine(1, 0, 0))
    assert [found[n].speedup for n in range(9, 3, -1)] == pytest.approx(
        [1.28, 1.89, 2.61, 3.43, 4.18, 4.92], rel=0.02
    )
    assert found[10].speedup == 1


def test_memory_falls_with_the_switch():
    memory = [f.memory / 2**30 for f in forecast(D30, D16, Workload(64, True, 2), Machine(1, 0, 0))]
    assert memory[0] < memory[8] < 0.6 * memory[10]


def test_fit_finds_the_rates():
    work = [
        Work(f * 1e9, b * 1e6, n)
        for f, b, n in ((1, 900, 300), (30, 950, 300), (200, 1200, 310), (2, 100, 90))
    ]
    machine = Machine(2e-11, 1e-10, 5e-6)
    found = fit(work, [machine.seconds(w) for w in work])
    assert [found.per_flop, found.per_byte, found.per_launch] == pytest.approx(
        [2e-11, 1e-10, 5e-6], rel=1e-6
    )
    falling = fit(work, [1.0, 0.5, 0.2, 0.1])
    assert min(falling.per_flop, falling.per_byte, falling.per_launch) >= 0


def table(*speedups):
    return [Forecast(n, 1 / s, 0.0, s) for n, s in enumerate(speedups)]


@pytest.mark.parametrize(
    ("speedups", "fid", "n"),
    [
        ((3.0, 2.8, 2.0, 1.75, 1.3, 1.0), {}, 3),  # the most of the large model at 1.7x
        ((3.0, 1.6, 1.5, 1.4, 1.3, 1.0), {}, 1),  # none reaches it
        ((1.02, 1.03, 1.0, 1.0, 0.9, 1.0), {}, 5),  # nothing wins
        (
            (3.0, 2.8, 2.0, 1.75, 1.3, 1.0),
            {"5": 10.0, "4": 10.5, "3": 10.9, "2": 10.95, "1": 12.0},
            2,
        ),
        ((3.0, 2.8, 2.0, 1.75, 1.3, 1.0), {"5": 10.0, "4": 12.5}, 5),  # no other is good enough
    ],
)
def test_choice(speedups, fid, n):
    chosen, reason = choose_n(table(*speedups), fid)
    assert chosen == n and reason.startswith(f"n {n}: ")
