"""The loop over iterations: whole pictures by speculation and plainly, streams of numbers, the
faster solver.
"""

from itertools import pairwise

import pytest
import torch
from scipy import stats

from specmm.core.stats import Stats
from specmm.image_ar.continuous.chain_speculation import ChainSpeculation
from specmm.image_ar.continuous.diffusion import ChainSteps, NoiseSchedule
from specmm.image_ar.continuous.diffusion_head import ChainHead, deterministic
from specmm.image_ar.continuous.masked_decode import Ancestral, ChainStats, decode_mar
from specmm.image_ar.continuous.orders import (
    BLOCK,
    MARSettings,
    log_uniforms,
    normals,
    random_orders,
)

PICTURES = 400


def generators(seed, count=PICTURES):
    return [torch.Generator().manual_seed(seed * 10_000 + i) for i in range(count)]


def pictures(model, sampler_of, seed):
    random = generators(seed)
    orders = torch.arange(16).repeat(PICTURES, 1)
    head = ChainHead(model.head, NoiseSchedule.of("ddim10"))
    sampler = sampler_of(head, normals(random), random)
    *_, last = decode_mar(
        model, torch.full((PICTURES,), 3), orders, sampler, MARSettings(3, "ddim10")
    )
    return last


def plain(head, normal, random):
    return Ancestral(head, normal)


def speculative(head, normal, random):
    return ChainSpeculation(head, normal, log_uniforms(random), 8)


def pvalues(a, b):
    """Of ten projections of whole pictures and of all tokens' coordinates together."""
    directions = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    whole = [(x.flatten(1) @ directions).T.numpy() for x in (a, b)]
    tokens = [x.flatten(0, 1).T.numpy() for x in (a, b)]
    return [
        stats.ks_2samp(x, y).pvalue for pair in (whole, tokens) for x, y in zip(*pair, strict=True)
    ]


@pytest.mark.slow
def test_pictures_by_speculation_have_the_distribution_of_plain_ones(tiny_mar, frozen):
    ours, theirs = (pictures(tiny_mar, how, seed) for how, seed in ((speculative, 1), (plain, 2)))
    # tokens of a picture are not independent
    assert min(pvalues(ours.tokens, theirs.tokens)[:10]) > 1e-3
    assert ours.stats.head_calls < 0.7 * theirs.stats.head_calls
    assert theirs.stats.head_calls_per_token == 10 and theirs.stats.rounds == 3 * PICTURES


@pytest.mark.slow
def test_pictures_without_the_residual_have_not(tiny_mar, frozen, drop_residual):
    drop_residual()
    broken = pictures(tiny_mar, speculative, 1)
    assert min(pvalues(broken.tokens, pictures(tiny_mar, plain, 2).tokens)) < 1e-3


def test_the_faster_solver_follows_the_exact_denoiser(gaussian):
    """For a Gaussian token, DDIM's map from noise to token is known: it is linear, with one factor
    a step.
    """
    schedule = NoiseSchedule.of("50")
    head = gaussian(schedule, torch.tensor([0.5]), torch.tensor([0.4]), 3)
    start = torch.tensor([[-1.0], [0.0], [2.0]])
    x, level = start.double(), schedule.alphas_cumprod.flip(0)
    for now, after in zip(level, [*level[1:], torch.ones(())], strict=True):
        spread = now * 0.16 + 1 - now
        eps = (1 - now).sqrt() * (x - now.sqrt() * 0.5) / spread
        clean = (x - (1 - now).sqrt() * eps) / now.sqrt()
        x = after.sqrt() * clean + (1 - after).sqrt() * eps
    got = deterministic(head, ChainSteps.ddim(schedule), start)
    torch.testing.assert_close(got.double(), x, atol=1e-3, rtol=1e-3)
    assert abs(float(got[1]) - 0.5) < 0.15


def test_streams_are_the_pictures_own():
    both, alone = normals(generators(1, 2)), normals(generators(1, 1))
    for rows, width in (([2, 3], 5), ([1, 0], 7), ([4, 4], 9), ([1, 1], BLOCK + 3)):
        assert torch.equal(both.draw(rows, width)[: rows[0]], alone.draw(rows[:1], width))


def test_streams_have_their_distributions():
    assert (
        stats.kstest(normals(generators(2, 1)).draw([1], 20_000)[0].numpy(), "norm").pvalue > 1e-3
    )
    uniform = log_uniforms(generators(3, 1)).draw([1], 20_000)[0]
    assert uniform.max() <= 0 and uniform.isfinite().all()
    assert stats.kstest(uniform.exp().numpy(), "uniform").pvalue > 1e-3


def test_orders_are_permutations_of_their_own_seed():
    orders = random_orders(generators(4, 3), 20)
    assert torch.equal(orders.sort(1).values, torch.arange(20).expand(3, -1))
    assert torch.equal(orders[2:], random_orders(generators(4, 3)[2:], 20))


@pytest.mark.parametrize(("count", "made"), [(1, 1), (7, 7), (16, 16), (40, 16)])
def test_every_token_is_made_once(count, made):
    parts = MARSettings(count, cfg=3.0).iterations(16)
    assert len(parts) == made and parts[0].last == 16 and parts[-1].first == 0
    assert all(a.first == b.last for a, b in pairwise(parts))


def test_counts_add_up():
    total = ChainStats()
    total.add(ChainStats(4, 2, head_calls=40, drafted=3, accepted=1))
    total.add(ChainStats(6, 2, head_calls=20, drafted=1, accepted=1))
    total.add(Stats(2, 1))
    assert total.tokens == 12 and total.head_calls_per_token == 5 and total.acceptance == 0.5
    assert total.tau == 12 / 5


def test_passes_run_without_cudnns_attention(tiny_mar):
    """It plans for each new length, and each iteration has one."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    seen = []
    block = tiny_mar.encoder_blocks[0]
    hook = block.register_forward_pre_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    pictures(tiny_mar, plain, 0)
    hook.remove()
    assert seen and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
