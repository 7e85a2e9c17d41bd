"""How far a drafter's distributions are from the target's: what trainings minimise, by name.

``kl`` is Kullback and Leibler's divergence, whose gradient is cross-entropy's; ``tv`` the total
variation, the chance that a draft is rejected. LK losses (arXiv 2602.23881): ``lk-alpha`` is the
likelihood of acceptance, -log α with α = Σ min(p, q), and ``lk-lambda`` λ KL + (1 - λ) TV, whose
weight λ = exp(-ETA·α) of a place is no part of the gradient. ``hass`` (2408.15766) adds the
cross-entropy of the target's ten best tokens to KL. ``griffin`` (2502.11018) does, too, and leaves
out what no drafting reaches: see :meth:`Places.counted`.

All work in float32 on logits of any float dtype, and stay finite where a token has none (-inf).
Shape letters: B batch, L positions, M places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specmm.extending.registry import unknown

ETA = 3.0  # the paper's best
BEST = 10  # of the target's tokens count more (HASS, GRIFFIN)
ALIGNED = 3  # a drafted token is among so many of the drafter's best (GRIFFIN)
LEAST = -1e4  # of log probabilities, so that those of impossible tokens have products
GRIFFIN = "griffin"
ROOM = 2**24  # logits of the drafter that are there at once, a few times 64 MiB
Head = Callable[[Tensor], Tensor]  # from states [..., C] to logits [..., V]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL [M] of log probabilities ``p`` and ``q`` [M, V], in nats; so are those below."""
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
    return 0.1 * kl(p, q) + _best(p, q)


def griffin(p: Tensor, q: Tensor) -> Tensor:
    """0.1 KL + 0.5 of the best tokens' cross-entropy [M], the release's weights."""
    return 0.1 * kl(p, q) + 0.5 * _best(p, q)


def _best(p: Tensor, q: Tensor) -> Tensor:
    found = p.topk(min(BEST, p.shape[-1]))
    chosen = found.indices.expand(*q.shape[:-1], -1)
    return -(found.values.exp() * q.gather(-1, chosen)).sum(-1)


LOSSES = {"kl": kl, "tv": tv, "lk-alpha": lk_alpha, "lk-lambda": lk_lambda}
LOSSES |= {"hass": hass, GRIFFIN: griffin}
ONE_PASS = tuple(name for name in LOSSES if name != GRIFFIN)  # for drafters that draft in one pass


def check_loss(name: str, known: Iterable[str] = tuple(LOSSES)) -> None:
    """Raise ``ValueError`` for a ``name`` that is none of the ``known`` losses."""
    if name not in known:
        raise unknown("loss", name, known)


def compared(loss: str, target: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """The ``loss`` [...] between logits [..., V] of the ``target`` and ``drafted`` ones, and their
    overlap Σ min(p, q) [...], with which a draft is accepted.
    """
    p, q = (x.float().log_softmax(-1).clamp(min=LEAST) for x in (target, drafted))
    with torch.no_grad():
        overlap = torch.minimum(p, q).exp().sum(-1)
    return LOSSES[loss](p, q), overlap


def of_drafts(
    loss: str, output: Head, logits: Head, wanted: Tensor, states: Tensor, places: Places
) -> tuple[Tensor, Tensor]:
    """The ``loss`` of each of K drafts in a row [K], and its overlap [K]: means over the
    ``places``.

    The target's head, ``output``, makes its distributions of ``wanted`` [M, C], the drafter's
    ``logits`` make its own of ``states`` [M, K, C]. No more than :data:`ROOM` logits are there at
    once: those of more places are computed part by part, and anew for the gradient.
    """

    def find(wanted: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            target = output(wanted)[:, None]
        drafted = logits(states)  # [m, K, v]
        best = drafted.topk(min(ALIGNED, drafted.shape[-1])).indices
        return *compared(loss, target, drafted), best

    rows = max(1, ROOM // max(1, states.shape[1] * output(wanted[:1]).shape[-1]))
    if len(wanted) <= rows:
        losses, overlaps, best = find(wanted, states)
    else:
        parts = zip(wanted.split(rows), states.split(rows), strict=True)
        found = [checkpoint(find, *part, use_reentrant=False) for part in parts]
        losses, overlaps, best = (torch.cat(each) for each in zip(*found, strict=True))
    counted = places.counted(best) if loss == GRIFFIN else torch.ones_like(losses)
    # GRIFFIN's release divides by those that count: noise, where few do, and not the same in parts
    return (losses * counted).sum(0) / max(1, len(losses)), overlaps.sum(0) / max(1, len(losses))


@dataclass(frozen=True)
class Places:
    """The M places of ``mask`` [B, L] where drafts are learnt, and the ``tokens`` [B, L] that are
    to be drafted at each; a drafter's tokens are the target's ``ids`` [v] (None: all). ``fresh``
    [B, L] ones read the target's own states in every step (None: none).
    """

    mask: Tensor
    tokens: Tensor
    ids: Tensor | None = None
    fresh: Tensor | None = None

    def counted(self, best: Tensor) -> Tensor:
        """Which places count in each of K steps [M, K], by GRIFFIN: those where all tokens that
        were drafted on the way are among the three ``best`` of their step [M, K, 3].
        """
        tokens = self.tokens[self.mask][:, None, None]
        best = best if self.ids is None else self.ids[best]
        hits = (best == tokens).any(-1)
        counted = self.mask
        found = []
        for hit in hits.unbind(1):
            found.append(counted[self.mask])
            counted = F.pad(counted.masked_scatter(self.mask, hit & found[-1])[:, :-1], (1, 0))
            counted = counted & self.mask
            if self.fresh is not None:
                counted = counted | (self.fresh & self.mask)
        return torch.stack(found, 1)
