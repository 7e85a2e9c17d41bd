"""The maximal coupling of Gaussians against quadrature: how often a draft is kept, and the
distribution of what comes out.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from specmm.image_ar.continuous import chain_round
from specmm.image_ar.continuous.chain_round import Normal, draw_residual, log_ratio
from specmm.image_ar.continuous.chain_speculation import StreamNumbers
from specmm.image_ar.continuous.orders import log_uniforms, normals

N = 20_000
CASES = [
    ((0.3, 1.0), (0.0, 1.0)),
    ((0.0, 0.7), (0.5, 1.3)),
    ((2.0, 0.5), (0.0, 1.0)),
    ((0.0, 1.0), (0.01, 1.0)),
]


def probs(mean, std, count=N, width=1):
    shape = (count, width)
    return Normal(np.full(shape, mean, np.float32), np.full(shape, 2 * np.log(std), np.float32))


def streams(seed, pictures=(0,)):
    def make(offset):
        return [torch.Generator().manual_seed(100 * seed + 10 * b + offset) for b in pictures]

    return normals(make(0)), log_uniforms(make(1))


def residual(p, q, pictures, batch, streams):
    """Draws [N, C] of what p has more of than q, for rows of ``pictures`` [N]."""
    y, lost = np.empty_like(p.mean), np.ones(len(p.mean), bool)
    draw_residual(p, q, y, lost, StreamNumbers(streams, np.array(pictures), batch))
    assert not lost.any()
    return y


def couple(p, q, seed=0, whole=True):
    """Draws [N, C] of p through drafts of q, and which drafts were kept."""
    rows, width = p.mean.shape
    numbers = StreamNumbers(streams(seed), np.zeros(rows, int), 1)
    y = q.sample(numbers.normals(None, width))
    kept = numbers.log_uniforms(None, 1)[:, 0] < log_ratio(p, q, y)
    lost = ~kept
    if whole:
        draw_residual(p, q, y, lost, numbers)
    elif lost.any():
        y[lost] = p[lost].sample(numbers.normals(lost, width))
    return y, kept


def overlap(a, b):
    """∫ min(p, q) by quadrature."""
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64).numpy()
    return float((x[1] - x[0]) * sum(map(min, stats.norm.pdf(x, *a), stats.norm.pdf(x, *b))))


@pytest.mark.parametrize(("p", "q"), CASES)
def test_drafts_are_kept_as_often_as_the_distributions_overlap(p, q):
    _, kept = couple(probs(*p), probs(*q))
    wanted = overlap(p, q)
    assert abs(float(kept.mean()) - wanted) < 4 * (wanted * (1 - wanted) / N) ** 0.5 + 1e-4


@pytest.mark.parametrize(("p", "q"), CASES)
def test_what_comes_out_has_the_targets_distribution(p, q):
    y, _ = couple(probs(*p), probs(*q), seed=1)
    assert stats.kstest(y[:, 0], stats.norm(*p).cdf).pvalue > 1e-3


def test_without_the_residual_it_has_not():
    (p, q) = CASES[1]
    y, _ = couple(probs(*p), probs(*q), seed=1, whole=False)
    assert stats.kstest(y[:, 0], stats.norm(*p).cdf).pvalue < 1e-6


def test_many_coordinates_of_different_widths():
    wide, mean = np.log(np.square([0.5, 1.0, 1.5])), np.array([0.2, 0.0, -0.1])
    p = Normal(np.tile(mean, (N, 1)).astype(np.float32), np.zeros((N, 3), np.float32))
    q = Normal(np.zeros((N, 3), np.float32), np.tile(wide, (N, 1)).astype(np.float32))
    y, kept = couple(p, q, seed=2)
    assert 0.2 < float(kept.mean()) < 0.8
    for c in range(3):
        assert stats.kstest(y[:, c], stats.norm(float(p.mean[0, c]), 1).cdf).pvalue > 1e-3
    both = (y - p.mean) @ np.array([0.6, -0.48, 0.64])
    assert stats.kstest(both, "norm").pvalue > 1e-3


def test_ratios_where_densities_underflow():
    p, q = probs(0.0, 1e-3, 1, 64), probs(5e-3, 1e-3, 1, 64)
    assert log_ratio(p, q, q.mean)[0] == pytest.approx(-0.5 * 25 * 64, rel=1e-4)


def test_no_residual_mass_falls_back_on_the_target(monkeypatch):
    monkeypatch.setattr(chain_round, "TURNS", (8, 16))
    monkeypatch.setattr(StreamNumbers, "turns", (8, 16))
    p = probs(1.0, 2.0, 4000)
    y = residual(p, p, [0] * 4000, 1, streams(3))
    assert stats.kstest(y[:, 0], stats.norm(1.0, 2.0).cdf).pvalue > 1e-3


def test_a_pictures_draws_do_not_depend_on_the_batch():
    # many, so that some go on looking and others do not
    p, q = (probs(0.0, 1.0, 60), probs(0.4, 1.2, 60))
    together = residual(p, q, [0] * 20 + [1] * 40, 2, streams(4, (0, 1)))
    for picture, rows in enumerate((slice(20), slice(20, 60))):
        count = len(together[rows])
        alone = residual(p[rows], q[rows], [0] * count, 1, streams(4, (picture,)))
        assert np.array_equal(together[rows], alone)
