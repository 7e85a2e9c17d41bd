"""Chains and trees from a block's marginals.

A chain's tokens are drawn independently, each recorded with its marginal, or each after those
before where the source has a table of pairs or a memory; when the target is greedy they are the
likeliest ones, as point masses. A tree holds the most probable paths under a budget of nodes (each
token after those before it likewise), as point masses. Sources: DEER (arXiv 2512.15176), DDTree,
and for the cut AdaEDL (arXiv 2410.18351).

Shape letters: B batch, K block, S what the source says of a place, N nodes, V vocabulary, v tokens
that the source knows of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.diffusion_drafters.drafters.sources import BlockSource
from specmm.diffusion_drafters.recorded_drafts import (
    DrafterVocabulary,
    followed_chain,
    followed_marginals,
    followed_tree,
    marginal_chain,
    with_points,
)
from specmm.drafter import Feedback
from specmm.hf.drafters.prompt_lookup import Recall
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.randomness import UniformSource
from specmm.shape.blocks import adaedl_stop, block_tree
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape


class ChainDrafter:
    """Chains of ``length`` drafts (None: the source's longest), drawn from what the block says.

    ``recall`` above 0 drafts, where that many of a row's latest tokens stood before, what followed
    them there (as point masses), and the block elsewhere. ``sure`` above 0 cuts a block in front of
    the first token whose marginal promises less acceptance than that (AdaEDL's bound), before
    anything is drawn. All rows of a batch stay as long as the longest; where uniforms are drawn a
    batch of several rows is never cut, for a row's uniforms must not depend on the others. Raises
    ``ValueError`` for a length that the source cannot draft, a bound outside [0, 1] and a negative
    ``recall``.
    """

    def __init__(
        self,
        source: BlockSource,
        target: VLMTarget,
        length: int | None = None,
        sure: float = 0.0,
        recall: int = 0,
    ) -> None:
        if not 0 <= sure <= 1:
            raise ValueError(f"sure must be in [0, 1], got {sure}")
        if recall < 0:
            raise ValueError(f"recall must be at least 0 tokens, got {recall}")
        self.source, self.target, self.sure = source, target, sure
        self.max_depth = block_length(source, length)
        self.max_nodes = self.max_depth + 1
        self.greedy, self.probs = target.processor.greedy, drafting_probs(target, source.known)
        self.shapes = [TreeShape.chain(n, target.device) for n in range(self.max_nodes)]
        self.recall = Recall(target, recall) if recall else None

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Let the source read the prompt."""
        self.clock = clock
        with clock("draft"):
            self.source.begin(feedback, self.max_depth)
            if self.recall is not None:
                self.recall.begin(feedback.token)

    def start_row(self, row: int) -> None:
        """Let the source read the prompt admitted."""
        with self.clock("draft"):
            self.source.start_row(row)
            if self.recall is not None:
                self.recall.start_row(row)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The chain after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        root, source, follow = feedback.token, self.source, self.source.follow
        with self.clock("draft"):
            block = source.logits(feedback, self.max_depth)  # [B, K, S]
            fixed, numbers = self._recalled(feedback), None if self.greedy else uniforms
            if follow is not None:
                if self.sure:
                    probs = followed_marginals(root, block, self.probs, follow, source.known)
                    sure = (
                        None if fixed is None else fixed.clamp(max=0)
                    )  # as sure as a point mass on any token
                    block = block[:, : self._length(with_points(probs, sure))]
                shape = self.shapes[block.shape[1]]
                return followed_chain(
                    root, block, self.probs, follow, source.known, numbers, fixed, shape
                )
            probs = with_points(source.known.spread(self.probs(block)), fixed)
            probs = probs[:, : self._length(probs)]
            shape = self.shapes[probs.shape[1]]
            if numbers is not None:
                return marginal_chain(root, probs, numbers, shape)
            return DraftTree(torch.cat([root[:, None], probs.argmax(-1)], dim=1), shape)

    def _recalled(self, feedback: Feedback) -> Tensor | None:
        """The tokens [B, K] that rows find after their latest ones further up; -1 where there is
        none.
        """
        if self.recall is None:
            return None
        self.recall.extend(feedback)
        fixed = feedback.token.new_full((len(feedback.token), self.max_depth), -1)
        for row, log in enumerate(self.recall.rows):
            if guess := log.guess(self.max_depth, self.recall.ngram):
                fixed[row, : len(guess)] = torch.tensor(guess, device=fixed.device)
        return fixed

    def _length(self, probs: Tensor) -> int:
        if not self.sure or (len(probs) > 1 and not self.greedy):
            return probs.shape[1]
        going = ~adaedl_stop(probs, self.sure)
        return int(going.long().cumprod(1).sum(1).max())


class BlockReader:
    """What drafters of trees share: a ``source`` that reads prompts, for blocks of ``max_depth``
    drafts.
    """

    source: BlockSource
    max_depth: int

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Let the source read the prompt."""
        self.clock = clock
        with clock("draft"):
            self.source.begin(feedback, self.max_depth)

    def start_row(self, row: int) -> None:
        """Let the source read the prompt admitted."""
        with self.clock("draft"):
            self.source.start_row(row)


class TreeDrafter(BlockReader):
    """The ``total``-node tree (root included) of the most probable paths of ``depth`` tokens at
    most.

    With a table of pairs or a memory it is found by beams, so that a larger tree only nearly holds
    the most probable.

    Raises ``ValueError`` for a depth that the source cannot draft and a budget without a draft.
    """

    def __init__(
        self, source: BlockSource, target: VLMTarget, total: int = 32, depth: int | None = None
    ) -> None:
        if total < 2:
            raise ValueError(f"total must be at least 2 nodes (the root and a draft), got {total}")
        self.source, self.target = source, target
        self.max_depth, self.max_nodes = block_length(source, depth), total
        self.probs = drafting_probs(target, source.known)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The tree after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        with self.clock("draft"):
            root, source = feedback.token, self.source
            block = source.logits(feedback, self.max_depth)  # [B, K, S]
            if source.follow is not None:
                return followed_tree(
                    root, block, self.probs, source.follow, source.known, self.max_nodes
                )
            return block_tree(source.known.spread(self.probs(block)), root, self.max_nodes)


def drafting_probs(target: VLMTarget, known: DrafterVocabulary) -> Processor:
    """The processor of drafts: the target's own, which agrees best; the plain softmax of a greedy
    or foreign one.

    What a target makes of tokens already seen is left to the target; ``known`` tokens may be fewer
    than its top k.
    """
    own = target.processor
    if not isinstance(own, Processor) or own.greedy:
        return Processor()
    return Processor(own.temperature, min(own.top_k, known.count), own.top_p, own.top_p_first)


def block_length(source: BlockSource, wanted: int | None) -> int:
    """Drafts a round; raises ``ValueError`` for none, and for more than ``source`` has."""
    length = source.longest if wanted is None else wanted
    if length is None or length < 1 or (source.longest is not None and length > source.longest):
        limit = "" if source.longest is None else f" and at most the drafter's {source.longest}"
        raise ValueError(f"length must be at least 1{limit}, got {length}")
    return length
