"""EAGLE-style drafting with a trained head: a static tree, sampled or of the likeliest tokens, or EAGLE-2's.

Each round the head first reads the tokens just committed with the target's hidden states, then one forward a level
reads the drafts with its own predictions. Its cache is preallocated: committed positions first, the round's drafts
in the scratch region behind them, so every round has the same shapes. As in the release, the head reads padded
prompt positions like any others.

Shape letters: B batch, G guidance branches, R = G·B rows, M most tokens committed a round, N tree nodes, n nodes fed
at a level, k beam width, C width, S slots, V vocabulary, P prefix positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmm.cache import Cache, CacheSize
from specmm.drafter import Feedback
from specmm.image_ar.tokens.drafters.eagle_head import EagleHead
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.randomness import Uniforms, categorical
from specmm.shape import eagle2
from specmm.shape.sampled import sample_siblings
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape

__all__ = ["Dynamic", "EagleDrafter", "EagleHead"]


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree: beams of ``top_k`` for ``depth`` levels behind the first, then the best ``total`` nodes."""

    top_k: int = 10
    depth: int = 4
    total: int = 59

    def __post_init__(self) -> None:
        most = 1 + self.top_k + self.depth * self.top_k**2
        if self.top_k < 1 or self.depth < 0 or not 2 <= self.total <= most:
            raise ValueError(
                f"total must be in [2, {most}] for top_k {self.top_k} and depth {self.depth}, got {self.total}"
            )


@dataclass(frozen=True)
class Level:
    """One level of a static tree: its ``nodes`` [n] below ``parents`` [n'], which all get ``width`` children drawn.

    ``pick`` [n] finds the nodes among the n' · width children. Of the parents, ``origin`` [n'] is each one's own
    parent's place among the parents a level up, and ``first`` the scratch slot from which they are stored.
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
            first, above = first + (len(parents) if depth > 1 else 0), parents  # the root is not stored as a draft
        return levels


class EagleDrafter:
    """Drafts with an :class:`EagleHead`.

    ``tree`` is a fixed shape, whose siblings are drawn without replacement from the recorded laws or, with
    ``sampled=False``, are the most likely tokens (point masses); or a :class:`Dynamic`, always point masses.
    Raises ``ValueError`` when the head was made for a target of other sizes.
    """

    def __init__(
        self, head: EagleHead, target: LlamaGenTarget, tree: TreeShape | Dynamic, sampled: bool = True
    ) -> None:
        if head.config.target != target.model.config:
            raise ValueError(f"head must be made for {target.model.config}, got one for {head.config.target}")
        self.head, self.target, self.tree = head.eval(), target, tree
        self.sampled = sampled and isinstance(tree, TreeShape)
        if isinstance(tree, TreeShape):
            self.max_nodes, self.max_depth = tree.size, tree.depth
            self.levels = Level.all_of(tree)
            self.fed = sum(len(level.parents) for level in self.levels[1:])
        else:
            self.max_nodes, self.max_depth, self.fed = tree.total, tree.depth + 1, tree.top_k * tree.depth
        self.chain = TreeShape.chain(self.max_depth, target.model.output.weight.device)

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Start a batch: a cache for the prefix and every token, and the attention masks of the tree."""
        hidden, config = feedback.output.hidden, self.head.config.target
        size = CacheSize(
            layers=1,
            heads=config.n_head,
            head_dim=config.head_dim,
            batch=len(feedback.token),
            branches=len(hidden) // len(feedback.token),
            capacity=config.cls_token_num - 1 + config.block_size,
            scratch=max(self.fed, self.max_depth + 1),
        )
        self.cache, self.clock = Cache(size, hidden.dtype, hidden.device), clock
        self.bias = hidden.new_full((size.rows, 1, self.fed, self.cache.slots), float("-inf"))
        if isinstance(self.tree, TreeShape) and self.fed:
            nodes = torch.cat([level.parents for level in self.levels[1:]])
            seen = self.tree.ancestors[0, nodes][:, nodes]  # the root is a committed position
            self.bias[..., size.capacity : size.capacity + self.fed].masked_fill_(seen, 0)

    def propose(self, feedback: Feedback, uniforms: Uniforms) -> DraftTree:
        """Draft the tree behind ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        state = self._read_committed(feedback)[:, None]  # [R, 1, C]
        self.bias[..., : self.cache.size.capacity] = self.cache.prefix_bias()[:, None, None]
        if isinstance(self.tree, TreeShape):
            return self._static(self.tree, feedback.token, state, uniforms)
        return self._dynamic(self.tree, feedback.token, state)

    def _static(self, shape: TreeShape, root: Tensor, states: Tensor, uniforms: Uniforms) -> DraftTree:
        tokens, laws = root[:, None].repeat(1, shape.size), None
        if self.sampled:
            laws = states.new_zeros(*tokens.shape, self.head.config.target.vocab_size, dtype=torch.float32)
        for depth, level in enumerate(self.levels):
            if depth:
                states = self._feed(tokens[:, level.parents], states[:, level.origin], depth, level.first)
            drafts, drawn = self._draw(self._logits(states, depth), level.width, uniforms)
            tokens.index_copy_(1, level.nodes, drafts.flatten(1).index_select(1, level.pick))
            if laws is not None and drawn is not None:
                laws.index_copy_(1, level.nodes, drawn.flatten(1, 2).index_select(1, level.pick))
        return DraftTree(tokens, shape, laws)

    def _draw(self, logits: Tensor, width: int, uniforms: Uniforms) -> tuple[Tensor, Tensor | None]:
        """Children [B, n, width] of each parent and the laws [B, n, width, V] they were drawn from."""
        if not self.sampled:
            return logits.topk(width).indices, None
        law = self.target.processor(logits)
        if width == 1:
            return categorical(law, uniforms.draw(law.shape[1]))[..., None], law[:, :, None]
        return sample_siblings(law, width, uniforms.draw(law[0].numel()).view(law.shape))

    def _dynamic(self, tree: Dynamic, root: Tensor, state: Tensor) -> DraftTree:
        k, capacity = tree.top_k, self.cache.size.capacity
        beam = eagle2.start(self._logits(state, 0)[:, 0].log_softmax(-1), k)
        states = state
        for depth in range(1, tree.depth + 1):
            first = (depth - 1) * k
            seen = beam.mask.repeat(self.cache.size.branches, 1, 1)  # [R, k, k · depth]
            scratch = self.bias[:, 0, first : first + k, capacity : capacity + k * depth]
            scratch.copy_(torch.zeros_like(seen, dtype=state.dtype).masked_fill_(~seen, float("-inf")))
            origin = beam.origin.repeat(self.cache.size.branches, 1)[..., None].expand(-1, -1, state.shape[-1])
            states = self._feed(beam.tokens, states.gather(1, origin), depth, first)
            beam = eagle2.step(beam, self._logits(states, depth).log_softmax(-1))
        return eagle2.finish(beam, root, tree.total)

    def _logits(self, states: Tensor, depth: int) -> Tensor:
        """Guided logits [B, n, V] after drafts at ``depth`` with predicted ``states`` [R, n, C]."""
        with self.clock("draft"):
            logits = self.target.model.output(states).float()
        return self.target.guide(logits, self.cache.lengths[:, None] + depth)

    def _feed(self, tokens: Tensor, states: Tensor, depth: int, first: int) -> Tensor:
        """Predicted states [R, n, C] after drafts ``tokens`` [B, n] at ``depth``, stored from scratch slot ``first``.

        ``states`` [R, n, C] are those predicted for the drafts themselves, at their parents.
        """
        cache, count = self.cache, tokens.shape[1]
        cache.aim(cache.size.capacity + first, cache.slots)
        positions = (cache.lengths[:, None] + depth - 1).expand(-1, count)
        return self._forward(tokens, states, positions, self.bias[:, :, first : first + count])

    def _read_committed(self, feedback: Feedback) -> Tensor:
        """Store the features of the tokens just committed; the state predicted after the last of them [R, C]."""
        if feedback.verdict is None or feedback.tokens is None:
            return self._read_prompt(feedback)
        cache, tokens, kept = self.cache, feedback.tokens, feedback.verdict.kept
        order = torch.arange(tokens.shape[1], device=tokens.device)
        cache.aim(cache.size.capacity, cache.slots)
        positions = cache.lengths[:, None] + order
        states = self._forward(tokens, feedback.kept_hidden(), positions, cache.tree_bias(self.chain.ancestors))
        cache.keep(order.expand(len(kept), -1), kept)
        last = (kept.clamp(min=1) - 1).repeat(cache.size.branches)
        return states[torch.arange(len(states), device=last.device), last]

    def _read_prompt(self, feedback: Feedback) -> Tensor:
        hidden, cache = feedback.output.hidden, self.cache
        prefix = hidden.shape[1]
        tokens = torch.nn.functional.pad(feedback.token[:, None], (prefix - 1, 0))  # the prefix counts as ids 0
        cache.aim(0, prefix)
        cache.lengths += prefix
        later = torch.ones(prefix, prefix, dtype=torch.bool, device=tokens.device).triu(1)
        bias = torch.zeros_like(later, dtype=hidden.dtype).masked_fill_(later, float("-inf"))
        positions = torch.arange(prefix, device=tokens.device)[None]
        return self._forward(tokens, hidden, positions, bias[None, None])[:, -1]

    def _forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """One pass of the head over ``tokens`` [B, n] and ``hidden`` [R, n, C] of both branches."""
        branches = self.cache.size.branches
        if len(positions) > 1:
            positions = positions.repeat(branches, 1)
        with self.clock("draft"):
            return self.head(tokens.repeat(branches, 1), hidden, positions, bias, self.cache.layers[0])
