"""Chains and trees from a block, with the distributions that drafts are drawn from.

Every draft is recorded with the distribution it was drawn from, so that verification is exact at
any temperature; tokens that were chosen, not drawn, are point masses. A chain's tokens are drawn
independently, each from its marginal (DEER, arXiv 2512.15176), or, if the source has a table of
pairs or a memory, each conditioned on the one before it. A tree holds the most probable paths under
a budget of nodes, as point masses (DDTree), or has a fixed shape, the children of a node drawn from
the distribution after it, by default without replacement. For a greedy target drafts are the
likeliest tokens, as point masses. A likeliest path recorded with its marginals would not be exact,
because it was not drawn from them.

Shape letters: B batch, K block, N nodes, P parents of a level, W beam width, S width of a place
(its logits, v, or the input from which they are made), R size of a memory, v tokens of the drafter,
V of the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.core.drafter import DrafterVocabulary, Feedback
from specmm.core.growth import Level
from specmm.core.randomness import UniformSource, categorical
from specmm.core.sorting import largest, likeliest, weighed
from specmm.core.stats import Clock
from specmm.core.tree import DraftTree, TreeShape
from specmm.diffusion_drafters.sources import BlockSource, DFlashSource, NextLogits
from specmm.hf.drafters.drafting import drafting_probs
from specmm.hf.drafters.prompt_lookup import lookup
from specmm.hf.models.target import VLMTarget
from specmm.shape import eagle2
from specmm.shape.blocks import block_tree
from specmm.shape.trees import Siblings, draw_siblings

Probs = Callable[[Tensor], Tensor]  # from logits [..., v] to probabilities
BEAM = 8  # least width of the beam that finds a likeliest tree


class SourceDrafter:
    """Base of drafters that take blocks of ``depth`` drafts (None: the longest) from a ``source``.

    Raises ``ValueError`` for a depth that the source cannot draft.
    """

    state: ClassVar[tuple[str, ...]] = ("source",)

    def __init__(self, source: BlockSource, target: VLMTarget, depth: int | None) -> None:
        self.source = source
        self.target = target
        self.max_depth = block_length(source, depth)
        self.greedy = target.processor.greedy
        self.probs = drafting_probs(target, source.vocabulary)
        self.weighs = False
        self.next_drafts: NextDrafts | None = None
        if source.next_logits is not None:
            self.next_drafts = NextDrafts(self.probs, source.next_logits, source.vocabulary)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Let the source read the prompt."""
        self.clock = clock
        with clock("draft"):
            self.source.begin(feedback, self.max_depth)

    def start_row(self, row: int) -> None:
        """Let the source read the prompt with which ``row`` was started."""
        with self.clock("draft"):
            self.source.start_row(row)

    def join(self) -> None:
        """Add a row at the end, which is then started; only for sources whose rows can join."""
        self._dflash_source.join()

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        self._dflash_source.leave(row)

    def weigh(self) -> None:
        """From now on, record the probability of each draft, also in greedy chains."""
        self.weighs = True

    def absorb(self, feedback: Feedback) -> None:
        """Read the committed tokens of a round that was drafted by another drafter."""
        self._dflash_source.absorb(feedback)

    @property
    def _dflash_source(self) -> DFlashSource:
        if not isinstance(self.source, DFlashSource):
            raise ValueError(
                f"a drafter with a {type(self.source).__name__} cannot add or remove rows during "
                "a run"
            )
        return self.source


def block_length(source: BlockSource, wanted: int | None) -> int:
    """Drafts a round; raises ``ValueError`` below 1 and beyond the blocks of ``source``."""
    length = source.longest if wanted is None else wanted
    if length is None or length < 1 or (source.longest is not None and length > source.longest):
        limit = "" if source.longest is None else f" and at most the drafter's {source.longest}"
        raise ValueError(f"length must be at least 1{limit}, got {length}")
    return length


class ChainDrafter(SourceDrafter):
    """Chains of ``length`` drafts (None: the source's longest).

    ``recall`` above 0: if that many of a row's latest tokens occur earlier in the row, the tokens
    that followed them are drafted (as point masses), otherwise the block. Raises ``ValueError`` for
    a length that the source cannot draft and a negative ``recall``.
    """

    def __init__(
        self, source: BlockSource, target: VLMTarget, length: int | None = None, recall: int = 0
    ) -> None:
        super().__init__(source, target, length)
        if recall < 0:
            raise ValueError(f"recall must be at least 0 tokens, got {recall}")
        self.recall = lookup(target, recall) if recall else None
        self.max_nodes = self.max_depth + 1
        self.shape = TreeShape.chain(self.max_depth, target.device)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Let the source read the prompt."""
        super().begin(feedback, clock)
        if self.recall is not None:
            with clock("draft"):
                self.recall.begin(feedback.token)

    def start_row(self, row: int) -> None:
        """Let the source read the prompt with which ``row`` was started."""
        super().start_row(row)
        if self.recall is not None:
            with self.clock("draft"):
                self.recall.start_row(row)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A chain: the block's likeliest tokens, or tokens drawn by its distributions."""
        root = feedback.token
        numbers = None if self.greedy else uniforms
        with self.clock("draft"):
            block = self.source.logits(feedback, self.max_depth)  # [B, K, S]
            fixed = self._recalled(feedback)
            if self.next_drafts is not None:
                return self.next_drafts.chain(root, block, self.shape, numbers, fixed, self.weighs)
            probs = with_point_masses(self.source.vocabulary.spread(self.probs(block)), fixed)
            if numbers is not None:
                return marginal_chain(root, probs, numbers, self.shape)
            tokens = torch.cat([root[:, None], likeliest(probs)], dim=1)
            chances = None
            if self.weighs:
                chances = F.pad(weighed(block, 1)[1][..., 0], (1, 0), value=1.0)
            return DraftTree(tokens, self.shape, chances=chances)

    def _recalled(self, feedback: Feedback) -> Tensor | None:
        """Tokens [B, K] that followed an earlier occurrence of the latest tokens; -1: none."""
        if self.recall is None:
            return None
        self.recall.extend(feedback)
        fixed = feedback.token.new_full((len(feedback.token), self.max_depth), -1)
        for row, log in enumerate(self.recall.rows):
            if guess := log.guess(self.max_depth, log.ngram):
                fixed[row, : len(guess)] = torch.tensor(guess, device=fixed.device)
        return fixed


class TreeDrafter(SourceDrafter):
    """The ``total``-node tree (root included) of the likeliest paths of at most ``depth`` tokens.

    With a table of pairs or a memory a beam search finds the tree, and a large one may miss a few
    of the likeliest paths. Raises ``ValueError`` for a depth that the source cannot draft and a
    budget without a draft.
    """

    def __init__(
        self, source: BlockSource, target: VLMTarget, total: int = 32, depth: int | None = None
    ) -> None:
        super().__init__(source, target, depth)
        if total < 2:
            raise ValueError(f"total must be at least 2 nodes (the root and a draft), got {total}")
        self.max_nodes = total

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        root = feedback.token
        with self.clock("draft"):
            block = self.source.logits(feedback, self.max_depth)  # [B, K, S]
            if self.next_drafts is not None:
                return self.next_drafts.tree(root, block, self.max_nodes)
            probs = self.source.vocabulary.spread(self.probs(block))
            return block_tree(probs, root, self.max_nodes)


class DrawnTreeDrafter(SourceDrafter):
    """Trees of a fixed ``shape``, the children of a node drawn as ``siblings`` says.

    All levels come from one forward of the source. With a greedy target, or not ``sampled``, the
    children are the likeliest tokens. Raises ``ValueError`` for a tree deeper than the source's
    blocks or with more children than there are tokens.
    """

    def __init__(
        self,
        source: BlockSource,
        target: VLMTarget,
        shape: TreeShape,
        sampled: bool = True,
        siblings: Siblings = "distinct",
    ) -> None:
        count = source.vocabulary.count
        if shape.width > count:
            raise ValueError(f"tree must have at most {count} children a node, got {shape.width}")
        super().__init__(source, target, shape.depth)
        self.greedy = self.greedy or not sampled
        self.max_nodes = shape.size
        self.shape = shape
        self.siblings = siblings
        self.levels = Level.all_of(shape)

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """A tree whose levels are drawn by the block's places, each after its parents."""
        vocabulary = self.source.vocabulary
        with self.clock("draft"):
            block = self.source.logits(feedback, self.max_depth)  # [B, K, S]
            tokens = feedback.token[:, None].repeat(1, self.max_nodes)
            probs = None
            if not self.greedy:
                probs = block.new_zeros(*tokens.shape, vocabulary.size, dtype=torch.float32)
            memory = None
            for place, level in zip(block.unbind(1), self.levels, strict=True):
                scores, memory = self._scores(place, tokens[:, level.parents], memory, level)
                drafts, drawn = self._draw(scores, level.width, uniforms)
                tokens.index_copy_(1, level.nodes, drafts.flatten(1).index_select(1, level.pick))
                if probs is not None and drawn is not None:
                    recorded = drawn.flatten(1, 2).index_select(1, level.pick)
                    probs.index_copy_(1, level.nodes, vocabulary.spread(recorded))
            return DraftTree(tokens, self.shape, probs)

    def _scores(
        self, place: Tensor, parents: Tensor, memory: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, P, v] after the tokens ``parents`` [B, P] of a level, and the next memory."""
        places = place[:, None].expand(-1, parents.shape[1], -1)
        if self.source.next_logits is None:
            return places, None
        before = None if memory is None else memory[:, level.origin]
        return self.source.next_logits(places, parents, before)

    def _draw(
        self, scores: Tensor, width: int, uniforms: UniformSource
    ) -> tuple[Tensor, Tensor | None]:
        """Children [B, P, width] of a level by ``scores`` [B, P, v], and their distributions."""
        if self.greedy:
            return self.source.vocabulary.to_target(largest(scores, width)[1]), None
        drafts, probs = draw_siblings(self.probs(scores), width, uniforms, self.siblings)
        return self.source.vocabulary.to_target(drafts), probs


def marginal_chain(
    root: Tensor, probs: Tensor, uniforms: UniformSource, shape: TreeShape | None = None
) -> DraftTree:
    """A chain after ``root`` [B], token i drawn from row i of ``probs`` [B, K, V] independently.

    ``probs`` must be final: after temperature, filters and barred tokens.
    """
    drafts = categorical(probs, uniforms.draw(probs.shape[1]))
    tokens = torch.cat([root[:, None], drafts], dim=1)
    shape = shape or TreeShape.chain(probs.shape[1], root.device)
    return DraftTree(tokens, shape, with_root(probs))


@dataclass(frozen=True)
class NextDrafts:
    """Drafts of a block that depend on earlier drafts, by a source's ``next_logits``."""

    probs: Probs
    next_logits: NextLogits
    vocabulary: DrafterVocabulary

    def chain(
        self,
        root: Tensor,
        block: Tensor,
        shape: TreeShape,
        uniforms: UniformSource | None,
        fixed: Tensor | None = None,
        weighs: bool = False,
    ) -> DraftTree:
        """A chain after ``root`` [B], token i drawn by place i of ``block`` [B, K, S] and the
        tokens before.

        Where ``fixed`` [B, K] holds a token (not -1), that is drafted as a point mass. Without
        ``uniforms`` every token is the likeliest one and no distributions are recorded, only the
        tokens' probabilities if ``weighs``.
        """
        count = block.shape[1]
        numbers = None if uniforms is None else uniforms.draw(count)
        points = [None] * count if fixed is None else fixed.unbind(1)
        tokens = [root]
        chances = [torch.ones_like(root, dtype=torch.float32)]
        recorded: list[Tensor] = []
        memory = None
        for i, (place, point) in enumerate(zip(block.unbind(1), points, strict=True)):
            scores, memory = self.next_logits(place, tokens[-1], memory)
            if numbers is None:
                draft = self.vocabulary.to_target(likeliest(scores))
                if weighs:
                    chances.append(weighed(scores, 1)[1][..., 0])
            else:
                dist = self.probs(scores)
                draft = self.vocabulary.to_target(categorical(dist, numbers[:, i]))
                recorded.append(with_point_masses(self.vocabulary.spread(dist), point))
            tokens.append(draft if point is None else torch.where(point >= 0, point, draft))
        probs = with_root(torch.stack(recorded, 1)) if recorded else None
        likely = torch.stack(chances, 1) if weighs and numbers is None else None
        return DraftTree(torch.stack(tokens, 1), shape, probs, chances=likely)

    def tree(self, root: Tensor, block: Tensor, total: int) -> DraftTree:
        """The tree of the ``total`` likeliest nodes (root included) under :meth:`chain`'s
        distribution, as point masses.

        They are found by EAGLE-2's beams over ``block`` [B, K, S], each node's children by the
        distribution after its own path: exactly the likeliest up to BEAM + 1 nodes, nearly beyond
        (5% less is expected of 32 nodes of flat distributions).
        """
        levels = block.shape[1]
        count = self.vocabulary.count
        enough = math.ceil(math.sqrt((total - 1) / (levels - 1))) if levels > 1 else total - 1
        width = min(max(min(BEAM, total - 1), enough), count)
        shift = self.vocabulary.shift
        scores, memory = self.next_logits(block[:, 0], root, None)
        beam = eagle2.start(self.probs(scores).log(), width, shift)
        memory = None if memory is None else memory[:, None]
        for place in block[:, 1:].unbind(1):
            before = None
            if memory is not None:
                before = memory.gather(1, beam.origin[..., None].expand(-1, -1, memory.shape[-1]))
            places = place[:, None].expand(-1, width, -1)
            scores, memory = self.next_logits(places, beam.tokens, before)  # [B, W, v]
            beam = eagle2.step(beam, self.probs(scores).log(), shift)
        return eagle2.finish(beam, root, total)


def with_point_masses(probs: Tensor, fixed: Tensor | None) -> Tensor:
    """``probs`` [..., V] with point masses where ``fixed`` [...] holds a token (not -1)."""
    if fixed is None:
        return probs
    points = F.one_hot(fixed.clamp(min=0), probs.shape[-1]).to(probs.dtype)
    return torch.where((fixed >= 0)[..., None], points, probs)


def with_root(probs: Tensor) -> Tensor:
    """Pad ``probs`` [B, K, V] to a chain's nodes [B, K + 1, V]; the root's are never read."""
    return F.pad(probs, (0, 0, 1, 0))
