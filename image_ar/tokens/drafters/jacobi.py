"""Speculative Jacobi decoding: drafts without a drafter (SJD, Teng et al. 2024, arXiv 2410.01699).

The window after the root is a chain. A round's forward gives the target's distribution at every
place of the window under the drafts before it; whatever is not kept is drawn afresh from these
newest distributions, and the next round verifies it.

Why that is exact: the distribution of every draft is settled before its uniform is drawn, as a
function of what earlier rounds revealed (kept tokens, all drafts, the recovered token), and no
uniform is used twice; so given all that was revealed the draft has the distribution the tree
records, under any exact rule. A draft kept over a round would not: rules that work bottom-up look
at every draft of a round, so the round's outcome tells about it.

Shape letters: B batch, W window, N = W + 1 nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from specmm.drafter import Feedback
from specmm.randomness import UniformSource, categorical
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape


class SizedTarget(Protocol):
    """A target that draws ``length`` tokens T on ``device``."""

    @property
    def length(self) -> int:
        """T."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...


class JacobiDrafter:
    """Drafts a chain of ``window`` tokens from the target's distributions of the round before.

    Places that enter the window take the distribution of the last place scored. Raises
    ``ValueError`` for a window that does not fit into a picture.
    """

    def __init__(self, target: SizedTarget, window: int = 16) -> None:
        if not 1 <= window < target.length:
            raise ValueError(f"window must be in [1, {target.length - 1}], got {window}")
        self.shape = TreeShape.chain(window, target.device)
        self.window = window
        self.max_nodes = window + 1
        self.max_depth = window

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch."""
        self.order = torch.arange(self.window, device=feedback.token.device)

    def start_row(self, row: int) -> None:
        """Nothing to do: no state is kept between rounds."""

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Draw the window after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        newest = feedback.output.probs
        probs = newest.new_zeros(len(newest), self.window + 1, newest.shape[-1])
        probs[:, 1:] = newest[:, -1:]
        if feedback.result is not None:
            # the node that predicts each place
            source = feedback.result.kept[:, None] + self.order  # [B, W]
            place = source.clamp(max=self.window)[..., None].expand(-1, -1, newest.shape[-1])
            probs[:, 1:] = newest.gather(1, place)
        drafts = categorical(probs[:, 1:], uniforms.draw(self.window))
        return DraftTree(torch.cat([feedback.token[:, None], drafts], dim=1), self.shape, probs)
