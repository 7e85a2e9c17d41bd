"""Speculative Jacobi decoding: drafts without a drafter (SJD, Teng et al. 2024, arXiv 2410.01699).

The window after the root is a chain. A round's forward gives the target's distribution at every
place of the window under the drafts before it; whatever is not kept is drawn afresh from these
newest distributions, and the next round verifies it.

Why that is exact: the distribution of every draft is settled before its number is drawn, as a
function of what earlier rounds revealed (kept tokens, all drafts, the recovered token), and no
number is used twice; so given all that was revealed the draft has the distribution the tree
records, under any exact rule. A draft kept over a round would not: rules that work bottom-up look
at every draft of a round, so the round's outcome tells about it.

Shape letters: B batch, W window, N = W + 1 nodes, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from specmm.drafter import Feedback
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.randomness import UniformSource, categorical
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape
from specmm.verify.exact import one_hot

Initial: TypeAlias = Literal["uniform", "left", "above"]


class JacobiDrafter:
    """Drafts a chain of ``window`` tokens from the target's distributions of the round before.

    Places that enter the window have no distribution yet; ``initial`` says where theirs comes from:
    ``"uniform"`` over the vocabulary; ``"left"``, the newest distribution there is (the last place
    scored); ``"above"``, the point mass of the token one raster row up, where that is known, else
    as ``"left"``. Raises ``ValueError`` on options out of range.
    """

    def __init__(self, target: LlamaGenTarget, window: int = 16, initial: Initial = "left") -> None:
        if not 1 <= window < target.length:
            raise ValueError(f"window must be in [1, {target.length - 1}], got {window}")
        if initial not in get_args(Initial):
            raise ValueError(
                f"initial must be one of {', '.join(get_args(Initial))}, got {initial!r}"
            )
        self.initial, self.grid, self.length = initial, target.model.config.grid, target.length
        self.shape = TreeShape.chain(window, target.model.output.weight.device)
        self.window, self.max_nodes, self.max_depth = window, window + 1, window

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch with nothing known but the first token."""
        batch, device = len(feedback.token), feedback.token.device
        self.order = torch.arange(self.window + 1, device=device)
        self.counts = torch.zeros_like(feedback.token)  # tokens committed
        self.tokens = feedback.token.new_zeros(batch, self.length + self.window + 1)

    def start_row(self, row: int) -> None:
        """See :class:`specmm.drafter.BatchingDrafter`."""
        self.counts[row] = 0

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Draw the window after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        newest = feedback.output.probs
        probs = newest.new_zeros(len(newest), self.window + 1, newest.shape[-1])
        probs[:, 1:] = self._initial_probs(feedback)
        if feedback.result is not None:
            source = (
                feedback.result.kept[:, None] + self.order[:-1]
            )  # the node that predicts each place
            scored = newest.gather(
                1, source.clamp(max=self.window)[..., None].expand(-1, -1, newest.shape[-1])
            )
            probs[:, 1:] = torch.where((source <= self.window)[..., None], scored, probs[:, 1:])
        drafts = categorical(probs[:, 1:], uniforms.draw(self.window))
        return DraftTree(torch.cat([feedback.token[:, None], drafts], dim=1), self.shape, probs)

    def _initial_probs(self, feedback: Feedback) -> Tensor:
        """Distributions of the window's places as if all were new: broadcastable to [B, W, V]."""
        newest = feedback.output.probs[:, -1:]  # [B, 1, V]
        if self.initial == "uniform":
            return torch.full_like(newest, 1 / newest.shape[-1])
        if self.initial == "left":
            return newest
        self._remember(feedback)
        above = (
            self.counts[:, None] + self.order[:-1] - self.grid
        )  # [B, W], raster index one row up
        known = (above >= 0) & (above < self.counts[:, None])
        token = self.tokens.gather(1, above.clamp(0, self.length - 1))
        return torch.where(known[..., None], one_hot(token, newest), newest)

    def _remember(self, feedback: Feedback) -> None:
        """Store the tokens just committed after each row's others."""
        if feedback.result is None or feedback.tokens is None:
            self.tokens[:, 0] = feedback.token
            self.counts += 1
            return
        where = self.counts[:, None] + self.order
        self.tokens.scatter_(1, where, feedback.tokens)
        self.counts += feedback.result.kept
