"""What the target already said about places ahead: its distributions after the drafts it rejected,
mixed into a drafter's.

The round before scored its whole tree. After a rejected draft the target gave a distribution for
the place after it, true but for one wrong token, which is what Speculative Jacobi Decoding (arXiv
2410.01699) drafts from. Mixed with a drafter's distribution it costs no forward and overlaps with
the target's more than either. Exactness does not depend on it: the mixture is settled before the
draft is drawn from it, and it is the distribution the tree records.

Shape letters: B batch, N nodes of the tree, D its depth, P parents of a level, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.drafter import Feedback
from specmm.methods import check_rejected_weight
from specmm.tree import TreeShape


class RejectedPositions:
    """Distributions of the tree before, for a drafter whose trees all have one shared ``shape``.

    A mixture is q^(1 - w) s^w, normalised, of the drafter's q and the older distribution s, with w
    = ``weight`` in [0, 1).
    """

    def __init__(self, shape: TreeShape, weight: float) -> None:
        check_rejected_weight(weight)
        self.weight, self.below = weight, first_below(shape)
        self.probs: tuple[Tensor, ...] | None = (
            None  # s^w by level [B, 1, V]; none before the first round
        )

    def read(self, feedback: Feedback) -> None:
        """Take the distributions after what ``feedback`` rejected; they serve the tree that is
        drafted next.
        """
        if feedback.result is None:
            self.probs = None
            return
        last = feedback.result.path.gather(
            1, (feedback.result.kept - 1).clamp(min=0)[:, None]
        )  # [B, 1]
        source = self.below[last[:, 0]]  # [B, D]
        probs, place = feedback.output.probs, source.clamp(min=0)[..., None]
        share = self.weight * (source >= 0)[..., None].to(probs.dtype)  # [B, D, 1]
        older = probs.gather(1, place.expand(-1, -1, probs.shape[-1])).clamp_(
            min=torch.finfo(probs.dtype).tiny
        )
        self.probs = older.pow_(share).split(1, dim=1)
        self.rest = (1 - share).split(1, dim=1)
        self.fresh = feedback.fresh

    def mix(self, probs: Tensor, depth: int) -> Tensor:
        """The distributions [B, P, V] of the parents' children at ``depth`` ≥ 1, mixed where there
        is an older one.
        """
        if self.probs is None:
            return probs
        mixed = probs.pow(self.rest[depth - 1]).mul_(self.probs[depth - 1])
        mixed.div_(mixed.sum(-1, keepdim=True))
        return mixed if self.fresh is None else torch.where(self.fresh[:, None, None], probs, mixed)


def first_below(shape: TreeShape) -> Tensor:
    """Node d steps below each node along first children, for d = 1 … D, -1 where there is none: [N,
    D].

    With the last node kept in row n, the distributions of these nodes are those of the places the
    next tree drafts: the first child stands where the recovered token now does.
    """
    child = torch.full(
        (shape.size + 1,), -1, device=shape.parents.device
    )  # the spare row keeps -1 at -1
    for node, (parent, rank) in enumerate(
        zip(shape.parents[0].tolist(), shape.ranks[0].tolist(), strict=True)
    ):
        if node and rank == 0:
            child[parent] = node
    steps = [child[:-1]]
    for _ in range(shape.depth - 1):
        steps.append(child[steps[-1]])
    return torch.stack(steps, dim=1)
