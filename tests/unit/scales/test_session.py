"""Plain decoding: equal to a straightforward loop, to teacher forcing, and to itself in other
batches.
"""

import pytest
import torch

from specmm.core.randomness import Uniforms
from specmm.image_ar.scales.next_scale import FeatureMap, Session, log_likelihood
from specmm.image_ar.scales.sampling import Sampling, ScaleTokens
from tests.unit.scales.straightforward_var import straightforward

LABELS = torch.tensor([3, 0, 7])


@pytest.mark.parametrize("shape", [{}, {"shared_aln": True}, {"attn_l2_norm": False}])
@pytest.mark.parametrize("options", [(3.0, 0, 1.0), (3.0, 10, 0.9), (0.0, 5, 1.0)])
def test_equals_a_straightforward_loop(make, vqvae, plain, shape, options):
    model, sampling = make.var(5, **shape), Sampling(*options)
    feature_map = plain(model, vqvae, LABELS, sampling, [1, 2, 3])
    tokens, f_hat = straightforward(
        model, vqvae.quantize, LABELS, *options, Uniforms.from_seeds([1, 2, 3])
    )
    assert all(torch.equal(a, b) for a, b in zip(feature_map.scales, tokens, strict=True))
    torch.testing.assert_close(feature_map.f_hat, f_hat, atol=1e-4, rtol=1e-4)
    # the test would prove little with one token everywhere
    assert len(torch.cat(tokens, 1).unique()) > 8


@torch.inference_mode()
@pytest.mark.parametrize("jumps", [(0, 1, 2, 3, 4), (4,), (2, 4), (0, 3, 4), (1, 2, 4)])
@pytest.mark.parametrize("cfg", [0.0, 1.5])
def test_scales_at_once_equal_scales_one_by_one(large, vqvae, jumps, cfg):
    feature_map, sampling = drawn_map(vqvae, LABELS), Sampling(cfg)
    session, parts = Session(large, LABELS, sampling, 4), []
    for k in jumps:
        parts.append(session.advance(feature_map, k))
    forced = [
        large(rows, feature_map.inputs(1, 4)) for rows in (LABELS, torch.full_like(LABELS, 10))
    ]
    levels = large.lvl_1L[0] / 4 * cfg
    wanted = (1 + levels[:, None]) * forced[0] - levels[:, None] * forced[1]
    starts = large.config.schedule.starts
    wanted = torch.cat([wanted[:, starts[k] : starts[k + 1]] for k in jumps], 1)
    torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_no_work_for_nothing(large, vqvae):
    feature_map, calls = drawn_map(vqvae, LABELS), []
    hook = large.head.register_forward_hook(
        lambda _, inputs, __: calls.append(tuple(inputs[0].shape[:2]))
    )
    session = Session(large, LABELS, Sampling(2.0), 4)
    for k in range(5):
        session.advance(feature_map, k)
    hook.remove()
    assert calls == [(3, 1), (3, 4), (3, 9), (3, 16), (3, 36)]  # guidance mixes what the head reads
    assert session.caches[0].keys.shape[1] == 30  # nothing stored of the last scale
    assert not Session(large, LABELS, Sampling(0.0), 4).guided


def drawn_map(vqvae, labels, seed=0):
    """A feature map full of random tokens."""
    feature_map = FeatureMap(vqvae.quantize, len(labels))
    generator = torch.Generator().manual_seed(seed)
    for k in range(len(feature_map.schedule)):
        shape = (len(labels), feature_map.schedule.tokens(k))
        feature_map.add(
            ScaleTokens(torch.randint(vqvae.config.vocab_size, shape, generator=generator))
        )
    return feature_map


@torch.inference_mode()
@pytest.mark.parametrize("cfg", [0.0, 1.5])
def test_likelihood_is_that_of_teacher_forcing(large, vqvae, cfg):
    feature_map, sampling = drawn_map(vqvae, LABELS), Sampling(cfg, temperature=0.7)
    tokens = feature_map.tokens
    own, null = (
        large(rows, feature_map.inputs(1, 4)) for rows in (LABELS, torch.full_like(LABELS, 10))
    )
    levels = large.lvl_1L[0][:, None] / 4 * cfg
    probs = (((1 + levels) * own - levels * null) / 0.7).log_softmax(-1)
    wanted = probs.gather(-1, tokens[..., None])[..., 0].mean(1)
    found = log_likelihood(large, vqvae.quantize, LABELS, tokens, sampling)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
