"""The target as its own drafter, with some of its layers left out.

The first layers alone are LayerSkip's early exit (arXiv 2404.16710), any others left out Draft &
Verify (arXiv 2309.08168). There is no second model and no second cache: a drafting pass attends the
keys and values that the target has committed, and writes those of its drafts into the scratch
slots, which verification then writes anew. So whatever the drafting passes compute, nothing of it
stays.

Shape letters: B batch, G guidance branches, R = G·B rows, n nodes, D drafts, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from specmm.cache import Cache
from specmm.drafter import Feedback
from specmm.processors import Processor
from specmm.randomness import UniformSource, categorical
from specmm.shape.blocks import adaedl_stop
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape

Skip: TypeAlias = tuple[int, ...]
"""The layers that are left out, in order."""


class Layered(Protocol):
    """A target that can run without some of its layers."""

    @property
    def layers(self) -> int:
        """How many layers it has."""
        ...

    @property
    def cache(self) -> Cache:
        """That of the batch."""
        ...

    def begin(self) -> None:
        """The target has begun a batch, or a row of it."""
        ...

    def logits(self, skip: Skip, tokens: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """Guided logits [B, n, V] after ``tokens`` [B, n], without the layers ``skip``.

        Keys and values go where the cache aims. ``positions`` [B, n] count the tokens of the text,
        ``bias`` [R, 1, n, S] is an additive mask.
        """
        ...


def skipped(layers: int, exit: int = 0, skip: Sequence[int] = ()) -> Skip:
    """The layers left out of ``layers``: all from ``exit`` on, or those of ``skip``.

    Raises ``ValueError`` for both at once, layers that there are not, and if none would be left or
    none left out.
    """
    if exit and skip:
        raise ValueError(f"give exit or skip, not both, got exit {exit} and skip {tuple(skip)}")
    if exit and not 0 < exit < layers:
        raise ValueError(
            f"exit must be in [1, {layers - 1}], for the model has {layers} layers, got {exit}"
        )
    found = tuple(range(exit, layers)) if exit else tuple(sorted(set(skip)))
    strange = [layer for layer in found if not 0 <= layer < layers]
    if strange:
        raise ValueError(
            f"skip must be layers from 0 to {layers - 1}, got {', '.join(map(str, strange))}"
        )
    if len(found) == layers:
        raise ValueError(f"skip must leave at least one of the {layers} layers, got all of them")
    return found


class SelfDrafter:
    """Chains of ``length`` drafts by the target without the layers ``skip``.

    Drafts are drawn from ``processor``'s distributions, which are recorded; where it is greedy they
    are the likeliest tokens, as point masses. ``sure`` above 0 ends a row's chain in front of the
    first token whose distribution promises less acceptance (AdaEDL's bound, arXiv 2410.18351). A
    greedy batch is cut where its last row ends. Where drafts are drawn all chains stay of full
    length, filled up with point masses, so that a row's uniforms do not depend on the others.
    Raises ``ValueError`` for a length below 1 and a bound outside [0, 1].
    """

    def __init__(
        self,
        target: Layered,
        processor: Processor,
        skip: Skip,
        length: int = 4,
        sure: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if not 0 <= sure <= 1:
            raise ValueError(f"sure must be in [0, 1], got {sure}")
        self.target = target
        self.processor = processor
        self.skip = skip
        self.sure = sure
        self.max_depth = length
        self.max_nodes = length + 1
        self.shapes = [TreeShape.chain(n, device) for n in range(length + 1)]

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Make the masks of the drafting passes."""
        self.clock = clock
        self.target.begin()
        cache = self.target.cache
        first = cache.size.capacity
        nodes = torch.arange(self.max_depth, device=cache.lengths.device)
        shape = (cache.size.rows, 1, self.max_depth, first + self.max_depth)
        self.bias = torch.full(shape, float("-inf"), dtype=cache.dtype, device=nodes.device)
        self.bias[..., first:].masked_fill_(nodes <= nodes[:, None], 0)

    def start_row(self, row: int) -> None:
        """The target has begun ``row`` anew; see :class:`specmm.drafter.BatchingDrafter`."""
        self.target.begin()

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The chain after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        with self.clock("draft"):
            first = self.target.cache.size.capacity
            self.bias[..., :first] = self.target.cache.prefix_bias()[:, None, None]
            if self.processor.greedy:
                return self._likeliest(feedback.token)
            return self._drawn(feedback.token, uniforms)

    def _likeliest(self, root: Tensor) -> DraftTree:
        tokens = [root]
        ended = torch.zeros_like(root, dtype=torch.bool)
        for place in range(self.max_depth):
            logits = self._after(tokens[-1], place)
            if self.sure:
                ended = ended | adaedl_stop(logits.float().softmax(-1), self.sure)
                if bool(ended.all()):
                    break
            tokens.append(logits.argmax(-1))
        return DraftTree(torch.stack(tokens, dim=1), self.shapes[len(tokens) - 1])

    def _drawn(self, root: Tensor, uniforms: UniformSource) -> DraftTree:
        numbers = uniforms.draw(self.max_depth)
        tokens = root[:, None].repeat(1, self.max_nodes)
        ended = torch.zeros_like(root, dtype=torch.bool)
        probs: Tensor | None = None
        for place in range(self.max_depth):
            q = self.processor(self._after(tokens[:, place], place))  # [B, V]
            if probs is None:
                probs = q.new_zeros(*tokens.shape, q.shape[-1])
                probs[..., 0] = 1
            if self.sure:
                ended = ended | adaedl_stop(q, self.sure)
                if bool(ended.all()):
                    tokens[:, place + 1 :] = 0
                    break
                q = torch.where(ended[:, None], probs[:, 0], q)
            probs[:, place + 1] = q
            tokens[:, place + 1] = categorical(q, numbers[:, place])
        return DraftTree(tokens, self.shapes[self.max_depth], probs)

    def _after(self, token: Tensor, place: int) -> Tensor:
        """Logits [B, V] after ``token`` [B], the ``place``-th of the chain, the root being 0."""
        cache = self.target.cache
        slot = cache.size.capacity + place
        cache.aim(slot, slot + 1)
        positions = cache.lengths[:, None] + place
        bias = self.bias[:, :, place : place + 1, : slot + 1]
        return self.target.logits(self.skip, token[:, None], positions, bias)[:, 0]
