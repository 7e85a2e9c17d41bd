"""A drafter of one's own: it drafts from the distribution that the target gave last.

    specmm --load demos/own/drafter.py bench pocket/llamagen --drafter echo

A drafter sees what the last round gave (:class:`specmm.core.drafter.Feedback`) and proposes a tree.
The one duty that exactness rests on: every draft that is drawn records the distribution it was
drawn from, given its earlier siblings. ``draw_siblings`` returns both.

Shape letters: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

import specmm
from specmm.core.drafter import Feedback
from specmm.core.randomness import UniformSource
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree
from specmm.extending.outside import DraftRequest
from specmm.shape.trees import draw_siblings


@specmm.register("drafter", "echo")
class Echo:
    """Neighbouring tokens of a picture are distributed alike, so the last distribution is a guess
    at the next ones.
    """

    tree = "chain(3)"  # unless the caller asks for another

    def __init__(self, target: Any, request: DraftRequest) -> None:
        self.shape = request.tree  # a static TreeShape
        self.sampled = request.sampled
        self.siblings = request.siblings
        self.max_nodes = self.shape.size
        self.max_depth = self.shape.depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """A new batch; nothing is kept of the last one."""

    def start_row(self, row: int) -> None:
        """A new sample in a row: nothing is kept by row, either."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The tree after ``feedback.token`` [B]."""
        last = feedback.output.probs[:, -1:]  # [B, 1, V], of the prefill
        if feedback.result is not None:  # of the last node that was kept
            end = feedback.result.path.gather(1, (feedback.result.kept - 1).clamp(min=0)[:, None])
            last = feedback.output.probs.take_along_dim(end[..., None], 1)
        tokens = feedback.token[:, None].repeat(1, self.shape.size)
        probs = last.repeat(1, self.shape.size, 1)
        for children in self.shape.children[0]:
            places = children[children >= 0]
            if self.sampled:
                drawn, q = draw_siblings(last, len(places), uniforms, self.siblings)
                tokens[:, places] = drawn[:, 0]
                probs[:, places] = q[:, 0]
            else:
                tokens[:, places] = torch.topk(last[:, 0], len(places)).indices
        return DraftTree(tokens, self.shape, probs if self.sampled else None)
