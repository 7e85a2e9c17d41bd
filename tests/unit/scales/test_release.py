"""All scales by the large model with the release's random numbers: plain decoding's distribution,
picture by picture.

Shape letters: B pictures.
"""

import itertools

import pytest
import torch

from specmm import methods
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import Sampling, VARSettings, sorted_mask
from tests import sampling

PICTURES = 4000


@torch.inference_mode()
def exact_probs(model, vqvae, sampling):
    """Chance [32] of every picture by the large model, teacher-forced."""
    pictures = torch.tensor(list(itertools.product((0, 1), repeat=5)))
    labels, tokens = torch.full((32,), 3), [pictures[:, :1], pictures[:, 1:]]
    inputs = vqvae.quantize.inputs(tokens)
    cond, null = model(labels, inputs), model(torch.full_like(labels, 10), inputs)
    coarse = sampling.probs(cond[:, :1], 0)
    fine = sampling.probs(2 * cond[:, 1:] - null[:, 1:], 1)
    probs = torch.cat([coarse, fine], 1).gather(2, pictures[:, :, None])[..., 0].double().prod(1)
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    return probs / probs.sum()


@pytest.fixture(scope="module")
def two_codes(make):
    """A pipeline of two codes on 1 + 4 tokens, and the chance of each of its 32 pictures."""
    model = make.var(3, depth=1, vocab_size=2, patch_nums=(1, 2), embed_dim=32, num_heads=2)
    vqvae = make.vqvae((1, 2), 2)
    return VARPipeline(model, vqvae, None, VARSettings(1.0, 1.5)), exact_probs(
        model, vqvae, Sampling(1.0, temperature=1.5)
    )


def p_value(pipe, probs):
    out = pipe(
        [3] * PICTURES,
        generator=torch.Generator().manual_seed(0),
        method=methods.CoDe(2, release=True),
        batch_size=PICTURES,
        output_type="latent",
    )
    return sampling.p_value(probs, out.tokens @ 2 ** torch.arange(4, -1, -1)), out.certificate


def test_the_large_model_alone_has_its_own_distribution(two_codes):
    found, certificate = p_value(*two_codes)
    assert found > 1e-3
    assert certificate.kind == "exact" and certificate.settings["cfg"] == 1.0


def test_a_temperature_left_out_of_the_last_scale_is_caught(two_codes, monkeypatch):
    """A broken twin."""
    monkeypatch.setattr(Sampling, "temperature_at", lambda self, k: 1.0 if k else 1.5)
    assert p_value(*two_codes)[0] < 1e-9


def test_soft_codes_claim_nothing(two_codes):
    """The release draws tokens beside the soft codes that the picture is made of."""
    pipe, _ = two_codes
    options = dict(more_smooth=True, temperature=1.0, output_type="latent")
    out = pipe([3], method=methods.CoDe(2, release=True), **options)
    assert out.certificate.kind == "heuristic" and "soft codes" in out.certificate.reason


def test_a_nucleus_claims_nothing(two_codes):
    """Of equal logits at its edge the release's sort leaves some out, where plain decoding keeps
    them all.
    """
    pipe, _ = two_codes
    out = pipe([3], method=methods.CoDe(2, release=True), top_p=0.9, output_type="latent")
    assert out.certificate.kind == "heuristic" and "ties" in out.certificate.reason
    logits, kept = torch.tensor([[[2.0, 1, 1, 1, 0]]]), Sampling(top_p=0.7)
    assert sorted_mask(logits, 0, 0.7).isfinite().sum() < kept.masked(logits).isfinite().sum()
