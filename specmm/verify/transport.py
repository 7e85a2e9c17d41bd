"""The yardstick: how often any exact rule could keep one of k independent drafts (optimal
transport).

Shape letters: V vocabulary; leading axes are free.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ot_bound(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """Largest acceptance [...] of ``drafts`` independent samples of ``q`` [..., V] under target
    ``p`` [..., V].

    1 + min over sets H of p(H) - q(H)^k (Hu et al. 2025); the best H takes tokens by ascending p /
    q. Computed in float64.
    """
    if drafts < 1:
        raise ValueError(f"drafts must be at least 1, got {drafts}")
    p, q = p.double(), q.double()
    order = (p / q).nan_to_num(nan=torch.inf).argsort(-1)
    inside = p.gather(-1, order).cumsum(-1) - q.gather(-1, order).cumsum(-1) ** drafts
    return 1 + inside.amin(-1).clamp(max=0)
