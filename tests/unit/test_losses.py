"""Losses by name: each against its formula in float64, safe where numbers are extreme, and in parts
as at once.
"""

import math

import pytest
import torch

from specmm.core.randomness import seeded
from specmm.recipes import losses
from specmm.recipes.losses import LOSSES, compared, of_drafts
from specmm.recipes.recipe import train

M, V = 6, 23


@pytest.fixture
def logits():
    with seeded(3):
        return torch.randn(M, V, dtype=torch.float64) * 3, torch.randn(M, V, dtype=torch.float64)


def plain(name, p, q):
    """A loss of probabilities [V] by its formula, token by token."""
    tokens = range(len(p))
    alpha = sum(torch.minimum(p[i], q[i]) for i in tokens)
    kl = sum(p[i] * (p[i].log() - q[i].log()) for i in tokens)
    best = sorted(tokens, key=lambda i: -float(p[i]))[:10]
    top = -sum(p[i] * q[i].log() for i in best)
    weight = (-3 * alpha.detach()).exp()
    return {
        "kl": kl,
        "tv": 1 - alpha,
        "lk-alpha": -alpha.log(),
        "lk-lambda": weight * kl + (1 - weight) * (1 - alpha),
        "hass": 0.1 * kl + top,
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_their_formulas(name, logits):
    target, drafted = logits
    drafted.requires_grad_()
    rows = zip(target.softmax(-1), drafted.softmax(-1), strict=True)
    wanted = torch.stack([plain(name, p, q) for p, q in rows])
    (slope,) = torch.autograd.grad(wanted.sum(), drafted)
    given = drafted.detach().float().requires_grad_()
    found, overlap = compared(name, target, given)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)  # float32's
    alpha = torch.minimum(target.softmax(-1), drafted.softmax(-1)).sum(-1)
    torch.testing.assert_close(overlap.double(), alpha)
    (own,) = torch.autograd.grad(found.sum(), given)
    torch.testing.assert_close(own.double(), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", sorted(set(LOSSES) - {"lk-lambda"})
)  # whose weight is no part of it
def test_a_gradient_is_that_of_differences(name, logits):
    target, drafted = logits

    def loss(given):
        return LOSSES[name](target.log_softmax(-1), given.log_softmax(-1))

    assert torch.autograd.gradcheck(loss, drafted.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_stay_finite(name, dtype):
    """Of distributions with next to nothing in common, tokens that cannot come, and equal ones."""
    none = float("-inf")
    target = torch.tensor([[300.0, 0, 0, none], [0, 0, 0, 0], [5, none, 0, 1]], dtype=dtype)
    drafted = torch.tensor([[0.0, 300, 0, 0], [0, 0, 0, 0], [0, 0, none, 1]], dtype=dtype)
    found, overlap = compared(name, target, drafted.requires_grad_())
    found.sum().backward()
    assert found.dtype == torch.float32
    assert bool(found.isfinite().all()) and bool(overlap.isfinite().all())
    assert bool(drafted.grad.isfinite().all())
    if name == "lk-alpha":  # where the total variation has no slope left
        assert float(found.detach()[0]) == pytest.approx(300 - math.log(3))
        assert float(drafted.grad[0, 0]) < -0.3


def drafts(loss, room, monkeypatch):
    """Loss, overlaps and gradients of three drafts in a row."""
    monkeypatch.setattr(losses, "ROOM", room)
    with seeded(1):
        head = torch.nn.Linear(8, V)
        wanted, states = torch.randn(M, 8), torch.randn(M, 3, 8, requires_grad=True)
    found, overlaps = of_drafts(loss, head, head, wanted, states)
    found.sum().backward()
    return found, overlaps, states.grad, head.weight.grad


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_the_places_give_what_all_at_once_do(name, monkeypatch):
    whole = drafts(name, 10**9, monkeypatch)
    for one, other in zip(whole, drafts(name, 3 * V, monkeypatch), strict=True):
        torch.testing.assert_close(one, other)


def test_parts_keep_no_logits(monkeypatch):
    """Nothing as large as the logits waits for the gradient."""
    kept = []

    def keep(x):
        kept.append(x.numel())
        return x

    for room, waits in ((10**9, True), (3 * V, False)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            drafts("lk-lambda", room, monkeypatch)
        assert (max(kept) >= M * 3 * V) is waits and (max(kept) < M * 3 * 9) is not waits


@pytest.mark.parametrize("kind", ["eagle3", "msd", "dflash", "deer", "drafter"])
def test_a_loss_that_does_not_exist_ends_a_training_at_once(kind):
    with pytest.raises(ValueError, match=r"^unknown loss 'mse'; choose from: [^.]*tv$"):
        train(kind, model="nowhere", loss="mse")
