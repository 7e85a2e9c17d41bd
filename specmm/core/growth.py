"""Draft trees grown by a feature head (EAGLE, MSD): sampled, of the likeliest tokens, or EAGLE-2's.

Each round the head first reads the tokens just committed with the target's hidden states. Then one
forward a level reads the drafts with the head's own predictions. The head's cache is preallocated,
with the round's drafts in the scratch region, so that every round has the same shapes.

Shape letters: B batch, G guidance branches, R = G·B rows, N tree nodes, n nodes fed at a level, k
beam width, C width, S slots, V the target's vocabulary, v the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from specmm.core.cache import Cache, branched
from specmm.core.drafter import DrafterVocabulary, Feedback
from specmm.core.randomness import UniformSource
from specmm.core.sorting import largest, weighed
from specmm.core.tree import DraftTree, TreeShape, at_nodes
from specmm.shape import eagle2
from specmm.shape.eagle2 import Dynamic
from specmm.shape.trees import Siblings, draw_siblings


@dataclass(frozen=True)
class Level:
    """One level of a static tree: its ``nodes`` [n] and their ``parents`` [n'].

    ``width`` children are drawn for every parent, and ``pick`` [n] finds the nodes among these
    n' · width. ``origin`` [n'] is the index of each parent's own parent among the parents one level
    up. The parents are stored from scratch slot ``first`` on.
    """

    nodes: Tensor
    parents: Tensor
    pick: Tensor
    width: int
    origin: Tensor
    first: int

    @classmethod
    def all_of(cls, shape: TreeShape) -> list[Level]:
        """The levels of a shared ``shape`` from depth 1 on."""
        levels: list[Level] = []
        first = 0
        above = shape.parents[0, :1]  # the root's: -1
        for depth in range(1, shape.depth + 1):
            nodes = (shape.depths[0] == depth).nonzero()[:, 0]
            parents, index = shape.parents[0, nodes].unique(return_inverse=True)
            ranks = shape.ranks[0, nodes]
            width = int(ranks.max()) + 1
            origin = torch.searchsorted(above, shape.parents[0, parents])
            levels.append(cls(nodes, parents, index * width + ranks, width, origin, first))
            first += len(parents) if depth > 1 else 0  # the root is not stored as a draft
            above = parents
        return levels


class FeatureHead(Protocol):
    """The interface of a drafter's network to the growth of trees."""

    def read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor, depth: int
    ) -> Tensor:
        """States [R, n, C] predicted after ``tokens`` [B, n] of the target's.

        ``hidden`` [R, n, ...] are the states before those tokens: predicted states for drafts at
        ``depth``, the target's states for committed tokens (depth 0). Keys and values are stored
        where the cache aims.
        """

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Logits [B, n, v] after nodes at ``depth`` with the predicted ``states`` [R, n, C]."""

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution [B, n, v] that drafts are drawn from."""


class Growth:
    """Grows the trees of one drafter; ``begin`` gives it the batch's cache.

    In a ``tree`` of fixed shape siblings are drawn as ``siblings`` says, and their distributions
    recorded; unless ``sampled``, they are the likeliest tokens, as point masses. A :class:`Dynamic`
    tree always has point masses. ``vocabulary`` is the drafter's. Raises ``ValueError`` if a node
    would have more children than there are tokens.
    """

    state: ClassVar[tuple[str, ...]] = ("cache", "mask", "bias")
    before = 0  # scratch slots, and rows of the mask, before those of the drafts
    weighs = False  # whether likeliest tokens of a tree of fixed shape come with their chances

    def __init__(
        self,
        tree: TreeShape | Dynamic,
        sampled: bool,
        vocabulary: DrafterVocabulary,
        device: torch.device | str = "cpu",
        siblings: Siblings = "distinct",
    ) -> None:
        self.tree = tree
        self.vocabulary = vocabulary
        self.siblings = siblings
        self.sampled = False
        if isinstance(tree, TreeShape):
            self.sampled = sampled
            self.max_nodes = tree.size
            self.max_depth = tree.depth
            self.levels = Level.all_of(tree)
            self.fed = sum(len(level.parents) for level in self.levels[1:])
            width = tree.width
        else:
            self.max_nodes = tree.total
            self.max_depth = tree.depth + 1
            self.fed = tree.top_k * tree.depth
            width = tree.top_k
        if width > vocabulary.count:
            raise ValueError(
                f"tree must have at most {vocabulary.count} children a node (the vocabulary), got "
                f"{width}"
            )
        self.chain = TreeShape.chain(self.max_depth, device).ancestors  # [1, D + 1, D + 1]

    @property
    def scratch(self) -> int:
        """Slots a round needs after the committed ones."""
        return max(self.fed, self.max_depth + 1)

    def begin(self, cache: Cache) -> None:
        """Start a batch, or continue one in a larger ``cache``: make the tree's attention mask."""
        self.cache = cache
        self.start = cache.size.capacity + self.before  # slot of the first draft
        shape = (cache.size.rows, 1, self.before + self.fed, cache.slots)
        self.mask = torch.full(shape, float("-inf"), dtype=cache.dtype, device=cache.lengths.device)
        self.bias = self.mask[:, :, self.before :]  # the rows of drafts
        if isinstance(self.tree, TreeShape) and self.fed:
            nodes = torch.cat([level.parents for level in self.levels[1:]])
            ancestors = self.tree.ancestors[0, nodes][:, nodes]  # the root is a committed position
            self.bias[..., self.start : self.start + self.fed].masked_fill_(ancestors, 0)

    def read_committed(self, head: FeatureHead, feedback: Feedback) -> Tensor:
        """Read the newly committed tokens; returns the state [R, C] predicted after the last."""
        assert feedback.result is not None and feedback.tokens is not None
        cache = self.cache
        tokens = feedback.tokens
        kept = feedback.result.kept
        order = torch.arange(tokens.shape[1], device=tokens.device)
        cache.aim(cache.size.capacity, cache.slots)
        positions = cache.lengths[:, None] + order
        bias = cache.tree_bias(self.chain)
        states = head.read(tokens, feedback.kept_hidden(), positions, bias, 0)
        cache.keep(order.expand(len(kept), -1), kept)
        last = branched(kept.clamp(min=1) - 1, cache.size.branches)
        return states[torch.arange(len(states), device=last.device), last]

    def grow(
        self, head: FeatureHead, root: Tensor, state: Tensor, uniforms: UniformSource
    ) -> DraftTree:
        """The tree below ``root`` [B], after which the head predicted ``state`` [R, C]."""
        self.bias[..., : self.cache.size.capacity] = self.cache.prefix_bias()[:, None, None]
        return self._below(head, root, state, uniforms)

    def _below(
        self, head: FeatureHead, root: Tensor, state: Tensor, uniforms: UniformSource
    ) -> DraftTree:
        """As :meth:`grow`, after the mask was updated for committed tokens."""
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
        """A tree of fixed ``shape`` below ``root``, one level a forward."""
        tokens = root[:, None].repeat(1, shape.size)
        probs = chances = None
        if self.weighs:
            chances = torch.ones_like(tokens, dtype=torch.float32)
        if self.sampled:
            probs = states.new_zeros(*tokens.shape, self.vocabulary.size, dtype=torch.float32)
        for depth, level in enumerate(self.levels):
            if depth:
                origin = level.origin.expand(len(states), -1)
                below = tokens[:, level.parents]
                states = self._feed(head, below, states, origin, depth, level.first)
            logits = head.logits(states, depth)
            if chances is None:
                drafts, drawn = self._draw(head, logits, level.width, uniforms)
            else:
                places, chance = weighed(logits, level.width)
                drafts, drawn = self.vocabulary.to_target(places), None
                chances.index_copy_(1, level.nodes, chance.flatten(1).index_select(1, level.pick))
            tokens.index_copy_(1, level.nodes, drafts.flatten(1).index_select(1, level.pick))
            if probs is not None and drawn is not None:
                recorded = drawn.flatten(1, 2).index_select(1, level.pick)
                probs.index_copy_(1, level.nodes, self.vocabulary.spread(recorded))
        return DraftTree(tokens, shape, probs, chances=chances)

    def _draw(
        self, head: FeatureHead, logits: Tensor, width: int, uniforms: UniformSource
    ) -> tuple[Tensor, Tensor | None]:
        """Children [B, n, width] of each parent, and their distributions [B, n, width, v]."""
        if not self.sampled:
            return self.vocabulary.to_target(largest(logits, width)[1]), None
        drafts, probs = draw_siblings(head.probs(logits), width, uniforms, self.siblings)
        return self.vocabulary.to_target(drafts), probs

    def _dynamic(self, head: FeatureHead, tree: Dynamic, root: Tensor, state: Tensor) -> DraftTree:
        """EAGLE-2's tree below ``root``: a beam grows for ``depth`` levels, then is reranked."""
        k = tree.top_k
        branches = self.cache.size.branches
        shift = self.vocabulary.shift
        beam = eagle2.start(head.logits(state, 0)[:, 0].log_softmax(-1), k, shift)
        states = state
        for depth in range(1, tree.depth + 1):
            first = (depth - 1) * k
            allow = branched(beam.mask, branches)  # [R, k, k · depth]
            scratch = self.bias[:, 0, first : first + k, self.start : self.start + k * depth]
            mask = torch.zeros_like(allow, dtype=state.dtype).masked_fill_(~allow, float("-inf"))
            scratch.copy_(mask)
            origin = branched(beam.origin, branches)
            states = self._feed(head, beam.tokens, states, origin, depth, first)
            beam = eagle2.step(beam, head.logits(states, depth).log_softmax(-1), shift)
        return eagle2.finish(beam, root, tree.total)

    def _feed(
        self,
        head: FeatureHead,
        tokens: Tensor,
        states: Tensor,
        origin: Tensor,
        depth: int,
        first: int,
    ) -> Tensor:
        """States [R, n, C] predicted after drafts ``tokens`` [B, n] at ``depth``.

        ``states`` [R, n', C] were predicted one level up; ``origin`` [R, n] are the parents there.
        Keys and values are stored from scratch slot ``first`` of the drafts on.
        """
        cache = self.cache
        count = tokens.shape[1]
        cache.aim(self.start + first, cache.slots)
        bias = self.bias[:, :, first : first + count]
        places = self._positions(depth, count)
        return head.read(tokens, at_nodes(states, origin), places, bias, depth)

    def _positions(self, depth: int, count: int) -> Tensor:
        """The text positions [R, n] of n = ``count`` drafts at ``depth``."""
        return (self.cache.lengths[:, None] + depth - 1).expand(-1, count)
