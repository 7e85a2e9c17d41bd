"""The losses of trainings, by name: distances of a drafter's distributions from the target's.

``kl`` is Kullback and Leibler's divergence, whose gradient is cross-entropy's; ``tv`` the total
variation, the chance that a draft is rejected. LK losses (arXiv 2602.23881): ``lk-alpha`` is the
likelihood of acceptance, -log α with α = Σ min(p, q), and ``lk-lambda`` λ KL + (1 - λ) TV, whose
weight λ = exp(-ETA·α) of a place is no part of the gradient. ``hass`` (2408.15766) adds the
cross-entropy of the target's ten best tokens to KL.

All compute in float32 on logits of any float dtype, and stay finite for logits of -inf. Shape
letters: M places, K drafts in a row, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specmm.extending.registry import unknown

ETA = 3.0  # the paper's best
BEST = 10  # the number of target tokens that count more (HASS)
LEAST = -1e4  # the least log probability, so that products with impossible tokens are finite
ROOM = 2**24  # logits of the drafter that are there at once, a few times 64 MiB
Head = Callable[[Tensor], Tensor]  # from states [..., C] to logits [..., V]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL [M] of log probabilities ``p`` and ``q`` [M, V], in nats, as in all losses here."""
    return (p.exp() * (p - q)).sum(-1)


def tv(p: Tensor, q: Tensor) -> Tensor:
    """Total variation [M], from 0 to 1."""
    return (p.exp() - q.exp()).relu().sum(-1)


def lk_alpha(p: Tensor, q: Tensor) -> Tensor:
    """-log α [M]: in logarithms, so that no overlap is too small to learn from."""
    return -torch.minimum(p, q).logsumexp(-1)


def lk_lambda(p: Tensor, q: Tensor) -> Tensor:
    """λ KL + (1 - λ) TV [M]."""
    distance = tv(p, q)
    weight = (-ETA * (1 - distance.detach())).exp()
    return weight * kl(p, q) + (1 - weight) * distance


def hass(p: Tensor, q: Tensor) -> Tensor:
    """0.1 KL + the best tokens' cross-entropy [M], the release's weights."""
    best = p.topk(min(BEST, p.shape[-1]))
    chosen = best.indices.expand(*q.shape[:-1], -1)
    return 0.1 * kl(p, q) - (best.values.exp() * q.gather(-1, chosen)).sum(-1)


LOSSES = {"kl": kl, "tv": tv, "lk-alpha": lk_alpha, "lk-lambda": lk_lambda, "hass": hass}


def check_loss(name: str) -> None:
    """Raise ``ValueError`` for an unknown ``name`` of a loss."""
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)


def compared(loss: str, target: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """The ``loss`` [...] between the logits [..., V] of ``target`` and ``drafted``, and their
    overlap Σ min(p, q) [...], a draft's probability of acceptance.
    """
    p, q = (x.float().log_softmax(-1).clamp(min=LEAST) for x in (target, drafted))
    with torch.no_grad():
        overlap = torch.minimum(p, q).exp().sum(-1)
    return LOSSES[loss](p, q), overlap


def of_drafts(
    loss: str, output: Head, logits: Head, wanted: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The ``loss`` of each of K drafts in a row [K], and its overlap [K]: means over places.

    The target's distributions are its head ``output`` of ``wanted`` [M, C]; the drafter's are
    ``logits`` of ``states`` [M, K, C]. At most :data:`ROOM` logits exist at once: with more places
    they are computed in parts, and again for the gradient.
    """

    def find(wanted: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            target = output(wanted)[:, None]
        return compared(loss, target, logits(states))

    rows = max(1, ROOM // max(1, states.shape[1] * output(wanted[:1]).shape[-1]))
    if len(wanted) <= rows:
        losses, overlaps = find(wanted, states)
    else:
        parts = zip(wanted.split(rows), states.split(rows), strict=True)
        results = [checkpoint(find, *part, use_reentrant=False) for part in parts]
        losses, overlaps = (torch.cat(values) for values in zip(*results, strict=True))
    return losses.sum(0) / max(1, len(losses)), overlaps.sum(0) / max(1, len(losses))
