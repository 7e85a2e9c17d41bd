"""Sampled siblings: the distributions by enumeration, the draws by chi-square against them."""

import itertools

import pytest
import torch

from specmm.shape.trees import sample_siblings, sample_siblings_iid, sibling_probs
from tests.sampling import p_of

PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])


def uniforms(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def p_value(tokens, probs_of, vocab):
    """Of ordered draws [n, k] against ``probs_of(tuple)``."""
    draws = itertools.product(range(vocab), repeat=tokens.shape[1])
    return p_of(torch.tensor([probs_of(draw) for draw in draws]), tokens)


def without_replacement(probs):
    def probability(draw):
        if len(set(draw)) < len(draw):
            return 0.0
        rest, product = probs.double().clone(), 1.0
        for token in draw:
            if rest.sum() <= 0:
                rest = torch.tensor(
                    [0.0 if t in draw[: draw.index(token)] else 1.0 for t in range(len(probs))]
                )
            product *= float(rest[token] / rest.sum())
            rest[token] = 0
        return product

    return probability


@pytest.mark.parametrize(
    "probs",
    [PROBS, torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2]), torch.tensor([0.98, 0.01, 0.005, 0.005])],
)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_distribution_without_replacement(probs, k, dtype):
    n = 100_000
    tokens, _ = sample_siblings(
        probs.expand(1, n, -1), k, uniforms(1, n, len(probs), seed=k, dtype=dtype)
    )
    assert p_value(tokens[0], without_replacement(probs), len(probs)) > 1e-3


def test_exhausted_distribution_goes_on_uniformly():
    dist = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0])
    tokens, probs = sample_siblings(dist.expand(1, 100_000, -1), 4, uniforms(1, 100_000, 5))
    assert set(tokens[0, :, :2].unique().tolist()) == {1, 3}
    assert p_value(tokens[0], without_replacement(dist), 5) > 1e-3
    torch.testing.assert_close(probs[0, 0, 2], torch.tensor([1.0, 0, 1, 0, 1]) / 3)
    assert probs[0, 0, 3, tokens[0, 0, 2]] == 0
    torch.testing.assert_close(probs[0, 0, 3].sum(), torch.tensor(1.0))


@pytest.mark.parametrize(
    "dist", [PROBS, torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.25] * 4)]
)
def test_sibling_distributions_by_enumeration(dist):
    """Every possible ordered draw: the distributions multiply to its probability."""
    k, probability = 3, without_replacement(dist)
    draws = [d for d in itertools.permutations(range(len(dist)), k) if probability(d) > 0]
    tokens = torch.tensor(draws)[None]
    probs = sibling_probs(dist.double().expand(1, len(draws), -1), tokens)
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, len(draws), k, dtype=torch.float64))
    chance = probs.gather(-1, tokens[..., None]).squeeze(-1).prod(-1)[0]
    torch.testing.assert_close(
        chance, torch.tensor([probability(d) for d in draws], dtype=torch.float64)
    )
    assert float(chance.sum()) == pytest.approx(1.0)
    for earlier in range(k - 1):  # an earlier sibling sibling has no mass left
        assert (
            probs[..., earlier + 1 :, :].gather(
                -1, tokens[..., earlier, None, None].expand(1, -1, k - 1 - earlier, 1)
            )
            == 0
        ).all()


def test_second_given_first():
    tokens, probs = sample_siblings(PROBS.view(1, 1, -1), 2, uniforms(1, 1, 5, seed=3))
    first = tokens[0, 0, 0]
    expected = PROBS / (1 - PROBS[first])
    expected[first] = 0
    torch.testing.assert_close(probs[0, 0], torch.stack([PROBS, expected]))


@pytest.mark.parametrize("extreme", [0.0, 1 - 2.0**-24])
def test_extreme_uniforms_keep_zero_tokens_last(extreme):
    dist = torch.zeros(1, 1, 50)
    dist[..., 7], dist[..., 20] = 1.0, 1e-30
    for other in (0.0, 0.5, 1 - 2.0**-24):
        u = torch.full((1, 1, 50), other)
        u[..., 7] = u[..., 20] = extreme
        tokens, probs = sample_siblings(dist, 3, u)
        assert set(tokens[0, 0, :2].tolist()) == {7, 20}
        assert probs.isfinite().all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(1, 1, 3))


def test_flat_image_like_distribution_first_token_mean():
    """V = 4096: the mean probability of the drawn token is the sum of squares, within its noise."""
    probs = torch.randn(4096, generator=torch.Generator().manual_seed(1)).mul(2).softmax(-1)
    n = 4000
    tokens, _ = sample_siblings(probs.expand(1, n, -1), 1, uniforms(1, n, 4096, seed=9))
    drawn = probs[tokens.flatten()]
    assert abs(float(drawn.mean() - probs.square().sum())) < 4 * float(drawn.std()) / n**0.5


def test_iid_draws_and_distributions():
    n = 100_000
    tokens, probs = sample_siblings_iid(PROBS.expand(1, n, -1), uniforms(1, n, 2))
    assert (
        p_value(tokens[0], lambda d: float(PROBS[d[0]].double() * PROBS[d[1]].double()), 5) > 1e-3
    )
    assert probs.shape == (1, n, 2, 5)
    torch.testing.assert_close(probs[0, 0], PROBS.expand(2, -1))


def test_iid_accepts_float64_uniforms_at_their_largest():
    tokens, _ = sample_siblings_iid(
        PROBS.view(1, 1, -1), torch.full((1, 1, 1), 1 - 2.0**-53, dtype=torch.float64)
    )
    assert tokens.item() == 3


def test_errors():
    with pytest.raises(ValueError, match=r"k must be in \[1, 5\]"):
        sample_siblings(PROBS.view(1, 1, -1), 6, torch.zeros(1, 1, 5))
    with pytest.raises(ValueError, match="uniforms must be"):
        sample_siblings(PROBS.view(1, 1, -1), 2, torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match="uniforms must be"):
        sample_siblings_iid(PROBS.view(1, 1, -1), torch.zeros(2, 1, 2))
