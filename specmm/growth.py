"""Draft trees grown from a feature head (EAGLE, MSD): sampled, of the likeliest tokens, or
EAGLE-2's.

Each round the head first reads the tokens just committed with the target's hidden states, then one
forward a level reads the drafts with its own predictions. Its cache is preallocated: committed
positions first, the round's drafts in the scratch region after them, so every round has the same
shapes.

Shape letters: B batch, G guidance branches, R = G·B rows, M most tokens committed a round, N tree
nodes, n nodes fed at a level, k beam width, C width, S slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specmm.cache import Cache, branched
from specmm.drafter import Feedback
from specmm.randomness import UniformSource
from specmm.shape import eagle2
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings, draw_siblings
from specmm.tree import DraftTree, TreeShape


@dataclass(frozen=True)
class Level:
    """One level of a static tree: its ``nodes`` [n] below ``parents`` [n'], which all get ``width``
    children drawn.

    ``pick`` [n] finds the nodes among the n' · width children. Of the parents, ``origin`` [n'] is
    each one's own parent's place among the parents a level up, and ``first`` the scratch slot from
    which they are stored.
    """

    nodes: Tensor
    parents: Tensor
    pick: Tensor
    width: int
    origin: Tensor
    first: int

    @classmethod
    def all_of(cls, shape: TreeShape) -> list[Level]:
        """The levels of a shared ``shape`` from depth 1 down, their nodes numbered in any way."""
        levels: list[Level] = []
        first, above = 0, shape.parents[0, :1]  # of the root: -1
        for depth in range(1, shape.depth + 1):
            nodes = (shape.depths[0] == depth).nonzero()[:, 0]
            parents, index = shape.parents[0, nodes].unique(return_inverse=True)
            ranks = shape.ranks[0, nodes]
            width = int(ranks.max()) + 1
            origin = torch.searchsorted(above, shape.parents[0, parents])
            levels.append(cls(nodes, parents, index * width + ranks, width, origin, first))
            first, above = (
                first + (len(parents) if depth > 1 else 0),
                parents,
            )  # the root is not stored as a draft
        return levels


class FeatureHead(Protocol):
    """What a drafter lends the growth of its trees."""

    def read(self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """States [R, n, C] predicted after ``tokens`` [B, n] with ``hidden`` [R, n, C], stored
        where the cache aims.
        """
        ...

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """The draft's logits [B, n, V] after nodes at ``depth``, whose predicted states are
        ``states`` [R, n, C].
        """
        ...

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution [B, n, V] that drafts are drawn from."""
        ...


class Growth:
    """Grows the trees of one drafter; ``begin`` hands it the batch's cache.

    ``tree`` is a fixed shape, whose siblings are drawn without replacement from the recorded
    distributions or, with ``sampled=False``, are the most likely tokens (point masses); or a
    :class:`Dynamic`, always point masses. ``siblings`` says how they are drawn instead. Raises
    ``ValueError`` when a node would have more children than there are tokens.
    """

    def __init__(
        self,
        tree: TreeShape | Dynamic,
        sampled: bool,
        vocabulary: int,
        device: torch.device | str = "cpu",
        siblings: Siblings = "distinct",
    ) -> None:
        self.tree, self.vocabulary, self.siblings = tree, vocabulary, siblings
        self.sampled = sampled and isinstance(tree, TreeShape)
        if isinstance(tree, TreeShape):
            self.max_nodes, self.max_depth = tree.size, tree.depth
            self.levels = Level.all_of(tree)
            self.fed = sum(len(level.parents) for level in self.levels[1:])
        else:
            self.max_nodes, self.max_depth, self.fed = (
                tree.total,
                tree.depth + 1,
                tree.top_k * tree.depth,
            )
        width = tree.width if isinstance(tree, TreeShape) else tree.top_k
        if width > vocabulary:
            raise ValueError(
                f"tree must have at most {vocabulary} children a node (the vocabulary), got {width}"
            )
        self.chain = TreeShape.chain(self.max_depth, device)

    @property
    def scratch(self) -> int:
        """Slots a round needs after the committed ones."""
        return max(self.fed, self.max_depth + 1)

    def begin(self, cache: Cache) -> None:
        """Start a batch, or go on with one in a larger ``cache``: lay out the attention masks of
        the tree.
        """
        self.cache = cache
        first = cache.size.capacity
        self.bias = cache.data.new_full((cache.size.rows, 1, self.fed, cache.slots), float("-inf"))
        if isinstance(self.tree, TreeShape) and self.fed:
            nodes = torch.cat([level.parents for level in self.levels[1:]])
            seen = self.tree.ancestors[0, nodes][:, nodes]  # the root is a committed position
            self.bias[..., first : first + self.fed].masked_fill_(seen, 0)

    def read_committed(self, head: FeatureHead, feedback: Feedback) -> Tensor:
        """Store the features of the tokens just committed; the state predicted after the last of
        them [R, C].
        """
        assert feedback.result is not None and feedback.tokens is not None
        cache, tokens, kept = self.cache, feedback.tokens, feedback.result.kept
        order = torch.arange(tokens.shape[1], device=tokens.device)
        cache.aim(cache.size.capacity, cache.slots)
        positions = cache.lengths[:, None] + order
        states = head.read(
            tokens, feedback.kept_hidden(), positions, cache.tree_bias(self.chain.ancestors)
        )
        cache.keep(order.expand(len(kept), -1), kept)
        last = branched(kept.clamp(min=1) - 1, cache.size.branches)
        return states[torch.arange(len(states), device=last.device), last]

    def grow(
        self, head: FeatureHead, root: Tensor, state: Tensor, uniforms: UniformSource
    ) -> DraftTree:
        """The tree below ``root`` [B], after which the head predicted ``state`` [R, C]."""
        self.bias[..., : self.cache.size.capacity] = self.cache.prefix_bias()[:, None, None]
        if isinstance(self.tree, TreeShape):
            return self._static(head, self.tree, root, state[:, None], uniforms)
        return self._dynamic(head, self.tree, root, state[:, None])

    def _static(
        self,
        head: FeatureHead,
        shape: TreeShape,
        root: Tensor,
        states: Tensor,
        uniforms: UniformSource,
    ) -> DraftTree:
        tokens, probs = root[:, None].repeat(1, shape.size), None
        if self.sampled:
            probs = states.new_zeros(*tokens.shape, self.vocabulary, dtype=torch.float32)
        for depth, level in enumerate(self.levels):
            if depth:
                states = self._feed(
                    head, tokens[:, level.parents], states[:, level.origin], depth, level.first
                )
            drafts, drawn = self._draw(head, head.logits(states, depth), level.width, uniforms)
            tokens.index_copy_(1, level.nodes, drafts.flatten(1).index_select(1, level.pick))
            if probs is not None and drawn is not None:
                probs.index_copy_(1, level.nodes, drawn.flatten(1, 2).index_select(1, level.pick))
        return DraftTree(tokens, shape, probs)

    def _draw(
        self, head: FeatureHead, logits: Tensor, width: int, uniforms: UniformSource
    ) -> tuple[Tensor, Tensor | None]:
        """Children [B, n, width] of each parent and the distributions [B, n, width, V] they were
        drawn from.
        """
        if not self.sampled:
            return logits.topk(width).indices, None
        return draw_siblings(head.probs(logits), width, uniforms, self.siblings)

    def _dynamic(self, head: FeatureHead, tree: Dynamic, root: Tensor, state: Tensor) -> DraftTree:
        k, capacity, branches = tree.top_k, self.cache.size.capacity, self.cache.size.branches
        beam = eagle2.start(head.logits(state, 0)[:, 0].log_softmax(-1), k)
        states = state
        for depth in range(1, tree.depth + 1):
            first = (depth - 1) * k
            seen = branched(beam.mask, branches)  # [R, k, k · depth]
            scratch = self.bias[:, 0, first : first + k, capacity : capacity + k * depth]
            scratch.copy_(
                torch.zeros_like(seen, dtype=state.dtype).masked_fill_(~seen, float("-inf"))
            )
            origin = branched(beam.origin, branches)[..., None].expand(-1, -1, state.shape[-1])
            states = self._feed(head, beam.tokens, states.gather(1, origin), depth, first)
            beam = eagle2.step(beam, head.logits(states, depth).log_softmax(-1))
        return eagle2.finish(beam, root, tree.total)

    def _feed(
        self, head: FeatureHead, tokens: Tensor, states: Tensor, depth: int, first: int
    ) -> Tensor:
        """Predicted states [R, n, C] after drafts ``tokens`` [B, n] at ``depth``, stored from
        scratch slot ``first``.

        ``states`` [R, n, C] are those predicted for the drafts themselves, at their parents.
        """
        cache, count = self.cache, tokens.shape[1]
        cache.aim(cache.size.capacity + first, cache.slots)
        positions = (cache.lengths[:, None] + depth - 1).expand(-1, count)
        return head.read(tokens, states, positions, self.bias[:, :, first : first + count])
