"""EAGLE-style drafting with a trained head: a static tree, sampled or of the likeliest tokens, or
EAGLE-2's.

The tree is grown by :class:`specmm.growth.Growth`; here is what is LlamaGen's: guidance, and a
prompt whose padded positions the head reads like any others, as in the release.

Shape letters: B batch, G guidance branches, R = G·B rows, n nodes, C width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.cache import Cache, CacheSize, branched
from specmm.drafter import Feedback
from specmm.growth import Growth
from specmm.image_ar.tokens.drafters.eagle_head import EagleHead
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.randomness import UniformSource
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape

__all__ = ["Dynamic", "EagleDrafter", "EagleHead"]


class EagleDrafter:
    """Drafts with an :class:`EagleHead`.

    ``tree``, ``sampled`` and ``siblings`` are those of :class:`specmm.growth.Growth`.
    Raises ``ValueError`` when the head was made for a target of other sizes.
    """

    def __init__(
        self,
        head: EagleHead,
        target: LlamaGenTarget,
        tree: TreeShape | Dynamic,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        if head.config.target != target.model.config:
            raise ValueError(
                f"head must be made for {target.model.config}, got one for {head.config.target}"
            )
        self.head, self.target = head.eval(), target
        weight = target.model.output.weight
        self.growth = Growth(tree, sampled, target.model.config.vocab_size, weight.device, siblings)
        self.max_nodes, self.max_depth = self.growth.max_nodes, self.growth.max_depth

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch: a cache for the prefix and every token, and the attention masks of the
        tree.
        """
        hidden, config = feedback.output.hidden, self.head.config.target
        size = CacheSize(
            layers=1,
            heads=config.n_head,
            head_dim=config.head_dim,
            batch=len(feedback.token),
            branches=len(hidden) // len(feedback.token),
            capacity=config.cls_token_num - 1 + config.block_size,
            scratch=self.growth.scratch,
        )
        self.cache, self.clock = Cache(size, hidden.dtype, hidden.device), clock
        self.growth.begin(self.cache)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """Draft the tree after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        prompt = feedback.result is None
        state = (
            self._read_prompt(feedback) if prompt else self.growth.read_committed(self, feedback)
        )
        return self.growth.grow(self, feedback.token, state, uniforms)

    def probs(self, logits: Tensor) -> Tensor:
        """The target's processing of the head's guided logits."""
        return self.target.processor(logits)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Guided logits [B, n, V] after drafts at ``depth`` with predicted ``states`` [R, n, C]."""
        with self.clock("draft"):
            logits = self.target.model.output(states).float()
        return self.target.guide(logits, self.cache.lengths[:, None] + depth)

    def read(self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """One pass of the head over ``tokens`` [B, n] and ``hidden`` [R, n, C] of both branches."""
        branches = self.cache.size.branches
        if len(positions) > 1:
            positions = branched(positions, branches)
        with self.clock("draft"):
            return self.head(
                branched(tokens, branches), hidden, positions, bias, self.cache.layers[0]
            )

    def _read_prompt(self, feedback: Feedback) -> Tensor:
        hidden, cache = feedback.output.hidden, self.cache
        prefix = hidden.shape[1]
        tokens = torch.nn.functional.pad(
            feedback.token[:, None], (prefix - 1, 0)
        )  # the prefix counts as ids 0
        cache.aim(0, prefix)
        cache.lengths += prefix
        later = torch.ones(prefix, prefix, dtype=torch.bool, device=tokens.device).triu(1)
        bias = torch.zeros_like(later, dtype=hidden.dtype).masked_fill_(later, float("-inf"))
        positions = torch.arange(prefix, device=tokens.device)[None]
        return self.read(tokens, hidden, positions, bias[None, None])[:, -1]
