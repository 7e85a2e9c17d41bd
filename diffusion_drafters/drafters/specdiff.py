"""SpecDiff: a chain denoised in several forwards, a piece at a time from the left, with its true
distribution.

Each forward reads the pieces drawn before it, so a token's row depends on the drafts in front of it
and on nothing after: that row is the distribution it was drawn from, and the ratio test is exact.
One step is an independent chain. Source: SpecDiff (arXiv 2408.05636), with pieces instead of random
places, whose joint distribution no row would tell.

Shape letters: B batch, K block, M tokens of a piece, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.diffusion_drafters.drafters.block import block_length, drafting_probs
from specmm.diffusion_drafters.drafters.sources import DiffusionSource
from specmm.diffusion_drafters.recorded_drafts import with_root
from specmm.drafter import Feedback
from specmm.hf.target import VLMTarget
from specmm.randomness import UniformSource, categorical
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape


class StepsDrafter:
    """Chains of ``length`` drafts in ``steps`` forwards; when the target is greedy, the likeliest
    tokens.

    Raises ``ValueError`` for a length or a number of steps below 1, and for more steps than drafts.
    """

    def __init__(
        self, source: DiffusionSource, target: VLMTarget, length: int = 12, steps: int = 4
    ) -> None:
        self.source, self.greedy, self.probs = (
            source,
            target.processor.greedy,
            drafting_probs(target, source.known),
        )
        self.max_depth = block_length(source, length)
        self.max_nodes = self.max_depth + 1
        if not 1 <= steps <= length:
            raise ValueError(
                f"steps must be at least 1 and at most the length, got {steps} for {length}"
            )
        self.pieces = [len(piece) for piece in torch.arange(length).tensor_split(steps)]
        self.shape = TreeShape.chain(length, target.device)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Let the source read the prompt."""
        self.clock = clock
        with clock("draft"):
            self.source.begin(feedback, self.max_depth)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The chain after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        with self.clock("draft"):
            logits = self.source.logits(feedback, self.max_depth)
            drafts, probs = feedback.token.new_empty(len(feedback.token), 0), list[Tensor]()
            for place, piece in enumerate(self.pieces):
                if place:
                    logits = self.source.behind(drafts, self.max_depth - drafts.shape[1])
                dist = self.probs(logits[:, :piece])  # [B, M, V]
                drawn = dist.argmax(-1) if self.greedy else categorical(dist, uniforms.draw(piece))
                drafts = torch.cat([drafts, drawn], dim=1)
                probs.append(dist)
        tokens = torch.cat([feedback.token[:, None], drafts], dim=1)
        return DraftTree(
            tokens, self.shape, None if self.greedy else with_root(torch.cat(probs, dim=1))
        )
