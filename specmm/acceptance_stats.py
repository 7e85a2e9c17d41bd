"""How often a drafter's child of a level and rank is the one kept: what trees are planned from.

Shape letters: B batch, D levels, K ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.drafter import Drafter, Feedback
from specmm.randomness import UniformSource
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape

WIDEST = (
    6,
    5,
    4,
    4,
    3,
    3,
    2,
    2,
)  # children by level of a spine wide enough to see what a tree may hold


class AcceptanceCounter:
    """A drafter that counts, by level and rank, which of another's drafts in a spine of ``shape``
    were kept.
    """

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        self.drafter, self.shape = drafter, shape
        self.max_nodes, self.max_depth = drafter.max_nodes, drafter.max_depth
        self.kept = torch.zeros(shape.depth, shape.width)
        self.visits = torch.zeros(shape.depth, 1)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start the drafter."""
        self.drafter.begin(feedback, clock)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Count the last round, then let the drafter draft."""
        if feedback.result is not None:
            self._count(feedback.result.path, feedback.result.kept)
        return self.drafter.propose(feedback, uniforms)

    def _count(self, path: Tensor, kept: Tensor) -> None:
        ranks = self.shape.ranks[0]
        for depth in range(1, path.shape[1]):
            before, node = path[:, depth - 1], path[:, depth]
            visited = (depth <= kept) & (
                ranks[before.clamp(min=0)] == 0
            )  # only the spine has children
            taken = ranks[node[visited & (depth < kept)]]
            self.visits[depth - 1] += visited.sum()
            self.kept[depth - 1] += torch.bincount(taken, minlength=self.kept.shape[1])

    def table(self) -> tuple[tuple[float, ...], ...]:
        """Shares [D, K], of the times their parent was kept."""
        shares = (
            self.kept / self.visits.clamp(min=1) * 1e4
        ).floor() / 1e4  # rounded down: a row sums to at most 1
        return tuple(tuple(round(v, 4) for v in row) for row in shares.tolist())
