"""What an N of CoDe takes, by the seconds of scales, which is chosen, and the arithmetic of
benchmarks against published counts.
"""

import pytest
import torch

from benchmarks.var import flops, forward_flops
from specmm.image_ar.scales.sampling import Sampling
from specmm.image_ar.scales.tuning import Forecast, ScaleSeconds, choose_n, forecast, parameters
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
    # the release computes the class's part at every scale, and the head of both halves
    again = flops(config, 1, True, range(1)) - forward_flops(config, 1, 2, 0, 0)
    heads = [
        2 * config.schedule.tokens(k) * config.embed_dim * config.vocab_size * (k > 0)
        for k in range(10)
    ]
    found = [(forward_flops(config, 1, 2, k, k) + again + heads[k]) / 1e9 for k in range(10)]
    assert found == pytest.approx(wanted, rel=0.03)
    assert parameters(config) == pytest.approx(size, rel=0.01)


def test_ideal_speedups():
    whole = flops(D30, 64, True, range(10))
    found = [
        whole / (flops(D30, 64, True, range(n)) + flops(D16, 64, True, range(n, 10)))
        for n in range(9, 3, -1)
    ]
    assert found == pytest.approx([1.28, 1.89, 2.61, 3.43, 4.18, 4.92], rel=0.02)


def seconds():
    """Of scales that take their tokens' seconds by the large model, a quarter by the small one."""
    tokens = [D30.schedule.tokens(k) for k in range(10)]
    return ScaleSeconds([float(n) for n in tokens], [n / 4 for n in tokens], sum(tokens) / 4, 7.0)


def test_seconds_of_an_n_are_those_of_its_scales_and_of_a_pass_over_the_coarser_ones():
    made, starts = seconds(), D30.schedule.starts
    for n in range(11):
        wanted = starts[n] + starts[-1] / 4 * (n < 10) + 7.0
        assert made.of(n, D30.schedule) == pytest.approx(wanted), n
    forecasts = forecast(D30, D16, made, 2, Sampling(1.5), torch.float32)
    assert [one.n for one in forecasts] == list(range(11)) and forecasts[10].speedup == 1
    assert forecasts[0].speedup == pytest.approx((680 + 7) / (170 + 7))


def test_memory_falls_with_the_switch():
    given = (seconds(), 64, Sampling(1.5), torch.bfloat16)
    memory = [f.memory / 2**30 for f in forecast(D30, D16, *given)]
    assert memory[0] < memory[8] < 0.6 * memory[10]


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
