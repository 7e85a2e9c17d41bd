"""Every way follows the distribution; filters and temperature act in the release's order."""

import pytest
import torch

from specmm.core.randomness import Uniforms
from specmm.image_ar.scales.sampling import (
    InverseCDF,
    ReleaseSampler,
    Sampling,
    gumbel,
    soften,
    sorted_mask,
)
from tests.sampling import p_value

LOGITS = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(0)) * 1.5
SAMPLING = Sampling(0.0, 8, 0.9, 1.3)
ROWS, PLACES = 40, 100


def probs():
    return (sorted_mask(LOGITS, 8, 0.9) / 1.3).softmax(-1)[0, 0].double()


@pytest.mark.parametrize("kind", ["inverse", "release"])
def test_every_way_follows_the_distribution(kind):
    uniforms = Uniforms.from_seeds(range(ROWS))
    sampler = {
        "inverse": lambda: InverseCDF(SAMPLING, uniforms, 4),
        "release": lambda: ReleaseSampler(SAMPLING, torch.Generator().manual_seed(0), 4),
    }[kind]()
    tokens = sampler.draw(LOGITS.expand(ROWS, PLACES, 12), 0).tokens
    assert tokens.shape == (ROWS, PLACES)
    assert 2 < (probs() > 0).sum() < 8
    assert p_value(probs() / probs().sum(), tokens.flatten()) > 1e-4


def test_distributions_of_sampling():
    torch.testing.assert_close(SAMPLING.probs(LOGITS, 0)[0, 0].double(), probs())
    assert SAMPLING.probs(LOGITS, 0).sum() == pytest.approx(1)
    greedy = Sampling(temperature=(0.0, 1.0))
    assert greedy.probs(LOGITS, 0).argmax() == LOGITS.argmax()
    assert greedy.probs(LOGITS, 0).max() == 1
    torch.testing.assert_close(greedy.probs(LOGITS, 1), LOGITS.softmax(-1))
    assert Sampling().masked(LOGITS) is LOGITS


def test_weights_grow_over_the_scales():
    assert [Sampling(4.0).weight(k, 5) for k in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert Sampling(4.0).weight(0, 1) == 0


def test_rows_have_their_own_uniforms():
    logits = LOGITS.expand(2, 50, 12)
    both = InverseCDF(Sampling(), Uniforms.from_seeds([5, 6]), 4).draw(logits, 0).tokens
    single = InverseCDF(Sampling(), Uniforms.from_seeds([6]), 4).draw(logits[:1], 0).tokens
    assert torch.equal(both[1:], single) and not torch.equal(both[0], both[1])


def test_soft_codes_harden():
    uniforms = torch.rand(1, 1, 12, generator=torch.Generator().manual_seed(0))
    noise = gumbel(uniforms.clone())
    assert torch.equal(noise.argsort(), uniforms.argsort())
    early, late = soften(LOGITS, noise, 0.0), soften(LOGITS, noise, 1.0)
    assert early.sum() == pytest.approx(1) and early.max() < late.max()
    choice = InverseCDF(Sampling(more_smooth=True), Uniforms.from_seeds([0]), 4).draw(LOGITS, 3)
    assert choice.weights.shape == (1, 1, 12) and choice.tokens == choice.weights.argmax(-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(cfg=float("nan")), "cfg must be finite and at least 0, got nan"),
        (dict(cfg=1e308), "cfg must be finite and at least 0, got 1e\\+308"),
        (dict(temperature=10**400), "temperature must be finite and at least 0, got an int"),
        (dict(top_k=-1), "top_k must be at least 0"),
        (dict(top_p=1.5), r"top_p must be in \(0, 1\]"),
        (dict(temperature=(1.0, -1.0)), "temperature must be finite and at least 0, got -1.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
