"""Trees of a fixed shape from a block: the children of a node drawn without replacement from the
distribution after it.

Every node's distribution is recorded, so that verification is exact at any temperature; with a
greedy target the children are the likeliest tokens, as point masses. All levels come from one
forward of the source, and what they do not know of one another from its table of pairs or its
memory, where it has one.

Shape letters: B batch, K block, S what the source says of a place, N nodes, P parents of a level, V
vocabulary, v tokens that the source knows of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.diffusion_drafters.drafters.block import BlockReader, block_length, drafting_probs
from specmm.diffusion_drafters.drafters.sources import BlockSource
from specmm.drafter import Feedback
from specmm.growth import Level
from specmm.hf.target import VLMTarget
from specmm.randomness import UniformSource
from specmm.shape.trees import Siblings, draw_siblings
from specmm.tree import DraftTree, TreeShape


class DrawnTreeDrafter(BlockReader):
    """Trees of ``shape``; see the module.

    Raises ``ValueError`` for a tree deeper than the source's blocks or with more children than
    there are tokens.
    """

    def __init__(
        self,
        source: BlockSource,
        target: VLMTarget,
        shape: TreeShape,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        if shape.width > source.known.count:
            raise ValueError(
                f"tree must have at most {source.known.count} children a node, got {shape.width}"
            )
        self.source, self.shape, self.siblings = source, shape, siblings
        self.max_depth, self.max_nodes = block_length(source, shape.depth), shape.size
        self.greedy = target.processor.greedy or not sampled
        self.probs = drafting_probs(target, source.known)
        self.levels = Level.all_of(shape)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The tree after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        with self.clock("draft"):
            block = self.source.logits(feedback, self.max_depth)  # [B, K, S]
            tokens = feedback.token[:, None].repeat(1, self.max_nodes)
            probs = None
            if not self.greedy:
                probs = block.new_zeros(*tokens.shape, self.source.known.size, dtype=torch.float32)
            memory = None
            for place, level in zip(block.unbind(1), self.levels, strict=True):
                scores, memory = self._scores(place, tokens[:, level.parents], memory, level)
                drafts, drawn = self._draw(scores, level.width, uniforms)
                tokens.index_copy_(1, level.nodes, drafts.flatten(1).index_select(1, level.pick))
                if probs is not None and drawn is not None:
                    recorded = drawn.flatten(1, 2).index_select(1, level.pick)
                    probs.index_copy_(1, level.nodes, self.source.known.spread(recorded))
            return DraftTree(tokens, self.shape, probs)

    def _scores(
        self, place: Tensor, parents: Tensor, memory: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, P, v] after the tokens ``parents`` [B, P] of a level, and the memory of what
        they say.
        """
        places = place[:, None].expand(-1, parents.shape[1], -1)
        if self.source.follow is None:
            return places, None
        return self.source.follow(
            places, parents, None if memory is None else memory[:, level.origin]
        )

    def _draw(
        self, scores: Tensor, width: int, uniforms: UniformSource
    ) -> tuple[Tensor, Tensor | None]:
        """Children [B, P, width] of a level's parents by ``scores`` [B, P, v], and their
        distributions.
        """
        if self.greedy:
            return self.source.known.name(scores.topk(width).indices), None
        drafts, probs = draw_siblings(self.probs(scores), width, uniforms, self.siblings)
        return self.source.known.name(drafts), probs
