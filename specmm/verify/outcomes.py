"""What a round's decisions amount to: where the path ends, and how many tokens the round commits on
average.

Shape letters: B batch, N nodes, M nodes tested bottom-up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.tree import TreeShape
from specmm.verify.rule import Decisions


def endings(shape: TreeShape, decisions: Decisions) -> Tensor:
    """Probability [B, N] that the path ends at each node, given the drafts."""
    if decisions.order is None:
        return _from_the_top(shape, decisions.accept)
    return _from_the_bottom(decisions.accept, decisions.order)


def expected_tokens(shape: TreeShape, decisions: Decisions) -> Tensor:
    """Expected number of tokens committed [B], given the drafts; the recovered or bonus token
    counts.
    """
    return (endings(shape, decisions) * (shape.depths + 1)).sum(1)


def _from_the_top(shape: TreeShape, accept: Tensor) -> Tensor:
    refuse = (1 - accept)[:, None]  # [B, 1, N]
    chosen = accept * torch.where(shape.earlier_siblings, refuse, 1.0).prod(-1)
    chosen[:, 0] = 1
    reached = torch.where(shape.ancestors, chosen[:, None], 1.0).prod(-1)
    nodes = torch.arange(shape.size, device=accept.device)
    child_of = (
        shape.parents[:, None, :] == nodes[:, None]
    )  # [1 or B, N, N]: column is a child of the row
    return reached * torch.where(child_of, refuse, 1.0).prod(-1)


def _from_the_bottom(accept: Tensor, order: Tensor) -> Tensor:
    order = order.expand(len(accept), -1)
    tested = accept.gather(1, order)
    before = torch.cat(
        [torch.ones_like(tested[:, :1]), (1 - tested).cumprod(1)], dim=1
    )  # [B, M + 1]
    ends = torch.zeros_like(accept).scatter(1, order, tested * before[:, :-1])
    ends[:, 0] = before[:, -1]
    return ends
