"""Speculation along the denoising chain has the distribution of plain sampling; without the
residual the same tests see it.
"""

import copy

import numpy as np
import pytest
import torch
from scipy import stats

from specmm.image_ar.continuous.chain_speculation import speculate
from specmm.image_ar.continuous.chain_windows import Response, WindowTables
from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead, HeadCondition, ancestral
from specmm.image_ar.continuous.orders import log_uniforms, normals

MEAN, STD = torch.tensor([0.5, -1.0, 0.0]), torch.tensor([0.3, 1.0, 2.0])
PROJECTIONS = 6


def streams(seed, batch=1):
    def make(offset):
        return [torch.Generator().manual_seed(1000 * seed + 10 * b + offset) for b in range(batch)]

    return normals(make(0)), log_uniforms(make(1))


def run(bound, schedule, rows, seed=0, window=8, temperature=1.0):
    tables = WindowTables(schedule, window)
    return speculate(bound, tables, rows, *streams(seed, len(rows)), temperature)


def plain(bound, schedule, rows, seed=0, temperature=1.0):
    noise = torch.randn(
        len(schedule) + 1, rows, bound.head.channels, generator=torch.Generator().manual_seed(seed)
    )
    return ancestral(bound, ChainSteps.ddpm(schedule), noise, temperature)


# --- a closed form ---


@pytest.mark.parametrize(
    ("temperature", "wide", "window"), [(1.0, -1.0, 8), (0.7, 0.3, 5), (1.0, 0.5, 25)]
)
def test_gaussian_tokens_have_the_distribution_of_the_recursion(
    gaussian, temperature, wide, window
):
    schedule, rows = NoiseSchedule.of("25"), 4000
    head = gaussian(schedule, MEAN, STD, rows, wide)
    got = run(head, schedule, [rows], window=window, temperature=temperature).tokens
    if temperature == 1.0:
        mean, std = head.probs()
    else:
        sampled = plain(
            gaussian(schedule, MEAN, STD, 20_000, wide), schedule, 20_000, 1, temperature
        )
        mean, std = sampled.mean(0), sampled.std(0)
    for c in range(3):
        assert (
            stats.kstest(got[:, c].numpy(), stats.norm(float(mean[c]), float(std[c])).cdf).pvalue
            > 1e-3
        )


def test_the_closed_form_is_that_of_plain_sampling(gaussian):
    schedule = NoiseSchedule.of("25")
    head = gaussian(schedule, MEAN, STD, 4000, 0.3)
    (mean, std), got = head.probs(), plain(head, schedule, 4000)
    for c in range(3):
        assert (
            stats.kstest(got[:, c].numpy(), stats.norm(float(mean[c]), float(std[c])).cdf).pvalue
            > 1e-3
        )


def test_the_broken_twin_is_seen_in_closed_form(gaussian, frozen, drop_residual):
    drop_residual()
    schedule = NoiseSchedule.of("25")
    head = gaussian(schedule, MEAN, STD, 4000, 0.5)
    got = run(head, schedule, [4000]).tokens
    mean, std = gaussian(schedule, MEAN, STD, 1, 0.5).probs()
    worst = min(
        stats.kstest(got[:, c].numpy(), stats.norm(float(mean[c]), float(std[c])).cdf).pvalue
        for c in range(3)
    )
    assert worst < 1e-6


def test_a_predictor_that_is_right_is_always_kept(gaussian):
    """Tokens of unit variance have reverse steps of variance β, v = 1: the drafter's distribution
    is then the target's.
    """
    schedule, one = NoiseSchedule.of("25"), torch.ones(3)
    result = run(gaussian(schedule, one * 0.4, one, 200, wide=1.0), schedule, [200], window=25)
    assert max(result.row_calls) <= 3  # the first window is drafted without knowing the mean


def test_a_response_is_the_share_of_the_variances_that_predictions_follow():
    """Predictions of a Gaussian of one variance, told with another."""
    rng = np.random.default_rng(0)
    share, told = np.array([0.3, 1.4], np.float32), np.float32(0.8)
    gain = rng.uniform(0.1, 1.0, (1, 9, 1)).astype(np.float32)
    ahead = np.concatenate([np.zeros((1, 1, 1), np.float32), gain.cumsum(1)], 1)
    response = Response(*np.ones((2, 2), np.float32))
    for _ in range(20):
        steps = rng.normal(size=(2, 9, 3)).astype(np.float32)
        moved = np.concatenate([np.zeros_like(steps[:, :1]), (gain * steps).cumsum(1)], 1)
        var = share[:, None, None] * told
        clean = (0.5 + var * moved) / (1 + var * ahead)
        excess = gain * (var / (1 + var * ahead) / share[:, None, None])[:, :-1]
        excess = np.concatenate([excess, excess[:, -1:]], 1)  # the last point has no step
        response = response.after(gain, steps, clean, excess)
    np.testing.assert_allclose(response.shares()[:, 0], share, rtol=1e-4)


def test_variances_that_are_too_wide_cost_fewer_calls_once_responses_are_measured(
    gaussian, monkeypatch
):
    """Tokens of half the width that the head tells."""
    schedule = NoiseSchedule.of("100")

    def calls():
        head = gaussian(schedule, torch.zeros(16), torch.full((16,), 0.4), 1000, wide=0.9)
        return run(head, schedule, [1000], window=16).row_calls

    measured = calls()
    monkeypatch.setattr(Response, "shares", lambda self: np.ones((len(self.seen), 1), np.float32))
    assert stats.ttest_ind(measured, calls(), alternative="less").pvalue < 1e-6


# --- the tiny model ---


def pvalues(a, b):
    """Two-sample Kolmogorov-Smirnov of the marginals and of random projections."""
    directions = torch.randn(a.shape[1], PROJECTIONS, generator=torch.Generator().manual_seed(5))
    both = [torch.cat([x, x @ directions], dim=1).T.numpy() for x in (a, b)]
    return [stats.ks_2samp(x, y).pvalue for x, y in zip(*both, strict=True)]


@pytest.mark.parametrize(
    ("spec", "rows", "scale", "temperature"),
    [("ddim10", 4000, 1.0, 1.0), ("ddim20", 1500, 2.0, 0.9)],
)
def test_the_tiny_models_tokens_have_the_distribution_of_plain_sampling(
    bind, spec, rows, scale, temperature
):
    schedule = NoiseSchedule.of(spec)
    wanted = plain(bind(rows, scale, spec), schedule, rows, 3, temperature)
    made = run(bind(rows, scale, spec), schedule, [rows], 4, temperature=temperature)
    assert min(pvalues(made.tokens, wanted)) > 1e-3


@pytest.mark.parametrize("residual", [True, False])
def test_tokens_in_bfloat16_have_the_distribution_of_plain_ones_in_bfloat16(
    tiny_mar, conditions, residual, frozen, drop_residual
):
    """And without the residual they have not."""
    schedule, rows = NoiseSchedule.of("ddim10"), 4000
    head = ChainHead(copy.deepcopy(tiny_mar.head).bfloat16(), schedule)
    z = conditions[:1].expand(rows, 1, -1)
    wanted = plain(head.bind(HeadCondition(z)), schedule, rows, 3)
    if not residual:
        drop_residual()
    made = run(head.bind(HeadCondition(z)), schedule, [rows], 4)
    worst = min(pvalues(made.tokens, wanted))
    assert worst > 1e-3 if residual else worst < 1e-6


def test_the_broken_twin_is_seen_on_the_tiny_model(bind, drop_residual):
    drop_residual()
    schedule, rows = NoiseSchedule.of("ddim10"), 4000
    wanted = plain(bind(rows, 1.0, "ddim10"), schedule, rows, 3)
    made = run(bind(rows, 1.0, "ddim10"), schedule, [rows], 4)
    assert min(pvalues(made.tokens, wanted)) < 1e-3


def test_few_head_calls_are_made_one_after_another(bind):
    schedule = NoiseSchedule.of("ddim100")
    calls = [run(bind(1), schedule, [1], seed, window=16).calls for seed in range(8)]
    assert sum(calls) / len(calls) <= 35


def test_a_picture_does_not_depend_on_its_batch(bind):
    schedule = NoiseSchedule.of("ddim50")
    together = run(bind(5, spec="ddim50"), schedule, [2, 3], 7)
    alone = run(bind(2, spec="ddim50"), schedule, [2], 7)
    torch.testing.assert_close(together.tokens[:2], alone.tokens, atol=1e-4, rtol=1e-4)
    assert together.row_calls[:2] == alone.row_calls


def test_the_large_table_and_its_absence_agree(bind, monkeypatch):
    from specmm.image_ar.continuous import diffusion_head

    schedule = NoiseSchedule.of("ddim50")
    kept = run(bind(3, 2.0, spec="ddim50"), schedule, [3], 8)
    monkeypatch.setattr(diffusion_head, "TABLE_LIMIT", 0)
    made = run(bind(3, 2.0, spec="ddim50"), schedule, [3], 8)
    torch.testing.assert_close(kept.tokens, made.tokens, atol=1e-4, rtol=1e-4)


# --- bad input ---


def test_a_chain_without_noise_cannot_be_speculated(bind):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        run(bind(1, spec="ddim50"), NoiseSchedule.of("ddim50"), [1], temperature=0.0)


@pytest.mark.parametrize(("noise", "width"), [(0.0, float("nan")), (0.0, 1e6), (float("nan"), 0)])
def test_answers_that_are_no_numbers_or_overflow(gaussian, noise, width):
    head = gaussian(NoiseSchedule.of("25"), MEAN + noise, STD, 2, width)
    with pytest.raises(ValueError, match="finite"):
        run(head, NoiseSchedule.of("25"), [2])
