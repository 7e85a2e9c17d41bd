"""Grows draft trees with one MTP layer per depth; each layer runs once a round.

Layer k drafts at depth k and attends to the slots of the text and of the drafts above. In one call
it reads the round's committed tokens and all drafts so far, each with the state that layer k - 1
predicted for the token before. Deeper levels are drafted by the last layer from its own states.

Shape letters: B rows, K layers, D deepest level, N tokens read in a round, n nodes of a level, C
width, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmm.core.cache import Cache
from specmm.core.drafter import Feedback
from specmm.core.growth import FeatureHead, Growth
from specmm.core.randomness import UniformSource
from specmm.core.tree import DraftTree, at_nodes


class LayerGrowth(Growth):
    """As :class:`specmm.core.growth.Growth`, for a head of several ``layers``, whose ``read`` runs
    layer ``depth``, or the last one below that.

    ``last`` [B, K, C]: each layer's prediction after the last committed token; the caller sets it
    for the prompt. A round's committed tokens stay in scratch slots, before its drafts, until the
    tree is grown. Only the first K = ``count`` layers, which the tree reaches, are run.
    """

    last: Tensor

    def __init__(self, layers: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.count = min(layers, self.max_depth)
        self.before = self.max_depth + 1

    @property
    def scratch(self) -> int:
        """Slots a round needs after the committed ones."""
        return self.before + self.fed

    def begin(self, cache: Cache) -> None:
        """See :class:`specmm.core.growth.Growth`; the mask begins with committed tokens' rows."""
        super().begin(cache)
        own_slots = slice(cache.size.capacity, self.start)
        self.mask[:, :, : self.before, own_slots].masked_fill_(self.chain, 0)
        self.order = torch.arange(self.before, device=self.mask.device)

    def read_committed(self, head: FeatureHead, feedback: Feedback) -> Tensor:
        """The first layer's state [B, C] after the last committed token; reads committed tokens.

        Without a result no token was committed since ``last`` was set.
        """
        rows = len(feedback.token)
        if feedback.result is None or feedback.tokens is None:
            self.kept = torch.zeros_like(feedback.token)
            tokens = feedback.token[:, None].expand(-1, self.before)  # read, but never attended
            hidden = self.last.new_zeros(rows, self.before, self.last.shape[-1])
        else:
            self.kept = feedback.result.kept
            tokens = feedback.tokens
            hidden = feedback.kept_hidden()
        self._show(self.kept)
        self.tokens = tokens
        self.places = self.cache.lengths[:, None] + self.order
        self.origin = self.order.expand(rows, -1)  # in [last, states]: the token before each
        self.cache.aim(self.cache.size.capacity, self.cache.slots)
        states = head.read(tokens, hidden, self.places, self.mask[:, :, : self.before], 0)
        return self._note(states, 0)

    def grow(
        self, head: FeatureHead, root: Tensor, state: Tensor, uniforms: UniformSource
    ) -> DraftTree:
        """See :class:`specmm.core.growth.Growth`; then the committed tokens move to their slots."""
        tree = self._below(head, root, state, uniforms)
        self.cache.keep(self.order.expand(len(root), -1), self.kept)
        return tree

    def _show(self, kept: Tensor) -> None:
        """Unmask earlier tokens and, for drafts, also the round's ``kept`` [B] tokens."""
        capacity = self.cache.size.capacity
        self.mask[..., :capacity] = self.cache.prefix_bias()[:, None, None]
        seen = self.bias[..., capacity : self.start]
        seen.copy_((self.order >= kept[:, None])[:, None, None])
        seen.masked_fill_(seen.bool(), float("-inf"))

    def _feed(
        self,
        head: FeatureHead,
        tokens: Tensor,
        states: Tensor,
        origin: Tensor,
        depth: int,
        first: int,
    ) -> Tensor:
        """As in :class:`specmm.core.growth.Growth`, with states of the layer of ``depth``."""
        if depth >= self.count:
            return super()._feed(head, tokens, states, origin, depth, first)
        count = tokens.shape[1]
        above = self.states.shape[1] - states.shape[1] if depth > 1 else self.kept[:, None]
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.places = torch.cat([self.places, self._positions(depth, count)], 1)
        self.origin = torch.cat([self.origin, origin + above], 1)
        self.cache.aim(self.cache.size.capacity, self.cache.slots)
        before = at_nodes(self.states, self.origin)
        bias = self.mask[:, :, : before.shape[1]]
        outputs = head.read(self.tokens, before, self.places, bias, depth)
        self._note(outputs, depth)
        return outputs[:, -count:]

    def _positions(self, depth: int, count: int) -> Tensor:
        """As in :class:`specmm.core.growth.Growth`, but committed tokens do not have slots yet."""
        return super()._positions(depth, count) + self.kept[:, None]

    def _note(self, states: Tensor, number: int) -> Tensor:
        """Store layer ``number``'s ``states`` [B, N, C]; return the state after the last token."""
        self.states = torch.cat([self.last[:, number, None], states], 1)
        last = at_nodes(self.states, self.kept[:, None])[:, 0]
        self.last[:, number] = last
        return last
