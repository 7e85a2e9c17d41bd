"""Counts in a run how often the draft of each level and rank is accepted.

Shape letters: D levels, K ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.core.drafter import Drafter, Feedback
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape

# Children by level of a spine wide enough to measure whatever a tree may hold.
WIDEST = (6, 5, 4, 4, 3, 3, 2, 2, 1, 1)


class AcceptanceCounter:
    """Wraps a drafter and counts, by level and rank, which drafts of a spine ``shape`` are kept."""

    def __init__(self, drafter: Drafter, shape: TreeShape) -> None:
        self.drafter = drafter
        self.shape = shape
        self.max_nodes = drafter.max_nodes
        self.max_depth = drafter.max_depth
        self.kept = torch.zeros(shape.depth, shape.width)
        self.visits = torch.zeros(shape.depth, 1)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        self.drafter.begin(feedback, clock)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Count the last round, then let the drafter draft."""
        if feedback.result is not None:
            self._count(feedback.result.path, feedback.result.kept)
        return self.drafter.propose(feedback, uniforms)

    def _count(self, path: Tensor, kept: Tensor) -> None:
        """Count the visited levels, and accepted ranks, of the paths of a round."""
        ranks = self.shape.ranks[0]
        for depth in range(1, path.shape[1]):
            before = path[:, depth - 1]
            node = path[:, depth]
            on_spine = ranks[before.clamp(min=0)] == 0  # the other nodes have no children
            visited = (depth <= kept) & on_spine
            accepted = ranks[node[visited & (depth < kept)]]
            self.visits[depth - 1] += visited.sum()
            self.kept[depth - 1] += torch.bincount(accepted, minlength=self.kept.shape[1])

    def table(self) -> tuple[tuple[float, ...], ...]:
        """The frequency [D, K] with which each rank was accepted, given that its parent was."""
        shares = self.kept / self.visits.clamp(min=1)
        shares = (shares * 1e4).floor() / 1e4  # rounded down: a row sums to at most 1
        return tuple(tuple(round(v, 4) for v in row) for row in shares.tolist())
