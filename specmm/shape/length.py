"""When drafting one more level is not worth it: AdaEDL's stop.

It looks only at the draft distribution of the token it gates, *before* that token is drawn, so the
drafted prefix keeps its distribution and the verification stays exact. Looking at the drawn token,
and then discarding it, is biased.

Shape letters: B batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(q: Tensor) -> Tensor:
    """Shannon entropy in nats [...] of the distributions ``q`` [..., V]; zero entries count as 0."""
    surprise: Tensor = torch.special.entr(q)
    return surprise.sum(-1)


def acceptance_bound(q: Tensor, gamma: float = 0.2) -> Tensor:
    """AdaEDL's estimate 1 - sqrt(gamma * H(q)) [...] of a lower bound on the acceptance
    probability, clamped at 0.
    """
    if gamma <= 0:
        raise ValueError(f"gamma must be positive, got {gamma}")
    return (1 - (gamma * entropy(q)).sqrt()).clamp(min=0)


def adaedl_stop(q: Tensor, threshold: float, gamma: float = 0.2) -> Tensor:
    """Whether to stop before drawing from ``q`` [B, V]: 1 - sqrt(gamma * H(q)) < threshold, [B]
    bool.

    AdaEDL (Agrawal et al., arXiv 2410.18351): the bound follows from Pinsker's inequality, with the
    unknown KL divergence to the target replaced by gamma times the draft's entropy.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}")
    return acceptance_bound(q, gamma) < threshold
