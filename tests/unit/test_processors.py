"""Processors against naive float64 twins; LlamaGen's own numbers are in
tests/integration/test_llamagen_parity.py.
"""

import itertools
import math

import pytest
import torch

from specmm.core.guidance import Guidance
from specmm.core.processors import Processor, check_finite, extremes


def naive_probs(row, processor):
    """One distribution [V] in plain Python: same order of steps, ties kept."""
    logits = [x / max(processor.temperature, 1e-5) for x in row.double().tolist()]
    filters = [(naive_top_k, processor.top_k), (naive_top_p, processor.top_p)]
    for keep, option in reversed(filters) if processor.top_p_first else filters:
        logits = keep(logits, option)
    return torch.tensor(softmax(logits), dtype=torch.float64)


def softmax(logits):
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def naive_top_k(logits, k):
    least = sorted(logits, reverse=True)[k - 1] if k else -math.inf
    return [x if x >= least else -math.inf for x in logits]


def naive_top_p(logits, p):
    probs = softmax(logits)
    mass_above = [sum(probs[j] for j in range(len(probs)) if logits[j] > x) for x in logits]
    return [
        x if p == 1 or mass <= p else -math.inf for x, mass in zip(logits, mass_above, strict=True)
    ]


GRID = [
    Processor(temperature=t, top_k=k, top_p=p, top_p_first=first)
    for t in (0.3, 0.6, 1.0, 1.7)
    for k, p in itertools.product((0, 1, 5, 40), (0.05, 0.7, 0.95, 1.0))
    for first in (False, True)
]


@pytest.mark.parametrize("processor", GRID, ids=str)
def test_distribution_matches_naive(processor):
    logits = (
        torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    )
    probs = processor(logits)
    expected = torch.stack([naive_probs(row, processor) for row in logits.flatten(0, 1)]).view_as(
        logits
    )
    torch.testing.assert_close(probs, expected, rtol=1e-12, atol=1e-14)
    assert processor(logits.float()).dtype == torch.float32
    torch.testing.assert_close(processor(logits.float()).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first", [False, True])
def test_ties_are_kept(first):
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    wanted = [True, True, True, True, False]
    assert (Processor(top_k=2, top_p_first=first)(logits) > 0).tolist() == wanted
    both = Processor(top_k=2, top_p=0.9, top_p_first=first)
    assert (both(logits) > 0).tolist() == [True, True, True, True, False]


def test_order_of_top_p_and_top_k_matters():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # 0.4 is 0.57 of the two kept
    assert int((Processor(top_k=2, top_p=0.5)(logits) > 0).sum()) == 1
    assert int((Processor(top_k=2, top_p=0.5, top_p_first=True)(logits) > 0).sum()) == 2


@pytest.mark.parametrize("first", [False, True])
def test_a_token_stays_while_the_mass_above_it_is_at_most_top_p(first):
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    above = logits.softmax(-1).cumsum(-1).tolist()
    for count in (1, 2, 3):  # the mass above the token after the first ``count``, to the last bit
        probs = Processor(top_p=above[count - 1], top_p_first=first)(logits)
        assert (probs > 0).tolist() == [place <= count for place in range(4)]


def test_full_size_options_change_nothing():
    logits = torch.randn(4, 16)
    assert torch.equal(Processor(top_k=16, top_p=1.0)(logits), logits.softmax(-1))


def test_low_precision_logits_give_float32_distributions():
    probs = Processor(top_k=3)(torch.randn(2, 8).bfloat16())
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))


def test_masked_logits_stay_masked():
    logits = torch.tensor([1.0, -math.inf, 0.5, -math.inf])
    kinds = ({}, dict(top_k=3), dict(top_p=0.99), dict(top_k=3, top_p=0.999999))
    for processor in (Processor(**kind) for kind in kinds):
        probs = processor(logits)
        assert probs[1] == probs[3] == 0 and probs.isfinite().all()


def test_temperature_zero_is_argmax():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 0.0]])
    assert Processor(temperature=0.0)(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_tiny_temperature_is_clamped():
    logits = torch.tensor([0.0, 1e-6])
    assert torch.equal(Processor(temperature=1e-9)(logits), Processor(temperature=1e-5)(logits))


def test_distributions_are_differentiable():
    logits = torch.randn(3, 9, requires_grad=True)
    Processor(temperature=0.8, top_k=4, top_p=0.9)(logits)[:, 0].sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite and at least 0, got nan"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Processor(**options)


def test_top_k_beyond_the_codebook():
    with pytest.raises(ValueError, match="top_k must be at most the codebook size 8, got 9"):
        Processor(top_k=9)(torch.zeros(8))


def test_guide():
    both = torch.randn(4, 1, 5, dtype=torch.float64)
    cond, uncond = both.chunk(2)
    anywhere = torch.zeros(1, 1, dtype=torch.int64)
    torch.testing.assert_close(Guidance(3.5).mix(both, anywhere, 0), uncond + 3.5 * (cond - uncond))
    assert torch.equal(Guidance(1.0).mix(cond, anywhere, 0), cond)
    for scale in (-1.0, math.nan):
        with pytest.raises(ValueError, match="cfg must be finite and at least 0"):
            Guidance(scale)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_check_finite(value, dtype):
    logits = torch.full((2, 3, 4), 6e4, dtype=dtype)  # a sum would overflow in half precision
    logits[0, 0, 0] *= -1
    check_finite(extremes(logits), "target in round 1")
    logits[1, 2, 3] = value
    with pytest.raises(ValueError, match="from the drafter in round 7"):
        check_finite(extremes(logits), "the drafter in round 7")
