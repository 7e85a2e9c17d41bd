"""The target as its own drafter, with some of its layers left out.

The first layers alone are LayerSkip's early exit (arXiv 2404.16710), any others left out Draft &
Verify (arXiv 2309.08168). There is no second model and no second cache: a drafting pass attends the
keys and values that the target has committed, and writes those of its drafts into the scratch
slots, which verification then writes anew.

The layers before the first one left out compute for a draft what the whole target would. So all
drafts go through these, the last one too, and verification goes on from there.

Shape letters: B batch, G guidance branches, R = G·B rows, n nodes, D drafts, S slots, C width, V
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.drafter import Feedback
from specmm.layered import Layered, Skip
from specmm.processors import Processor
from specmm.randomness import UniformSource, categorical
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape


class SelfDrafter:
    """Chains of ``length`` drafts by the target without the layers ``skip``.

    Drafts are drawn from ``processor``'s distributions, which are recorded; where it is greedy they
    are the likeliest tokens, as point masses. Raises ``ValueError`` for a length below 1.
    """

    def __init__(
        self,
        target: Layered,
        processor: Processor,
        skip: Skip,
        length: int = 4,
        device: torch.device | str = "cpu",
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.target = target
        self.processor = processor
        self.skip = skip
        self.max_depth = length
        self.max_nodes = length + 1
        self.shape = TreeShape.chain(length, device)

    @property
    def common(self) -> int:
        """Layers from the first on that compute for a draft what the whole target would."""
        return self.skip[0] if self.target.resumes else 0

    def begin(self, feedback: Feedback, clock: Clock) -> None:
        """Make the masks of the drafting passes."""
        self.clock = clock
        self.target.begin()
        cache = self.target.cache
        nodes = torch.arange(self.max_depth + 1, device=cache.lengths.device)
        shape = (cache.size.rows, 1, len(nodes), cache.size.capacity + len(nodes))
        self.bias = torch.full(shape, float("-inf"), dtype=cache.dtype, device=nodes.device)
        self.bias[..., cache.size.capacity :].masked_fill_(nodes <= nodes[:, None], 0)

    def start_row(self, row: int) -> None:
        """The target has begun ``row`` anew; see :class:`specmm.drafter.BatchingDrafter`."""
        self.target.begin()

    def propose(self, feedback: Feedback, uniforms: UniformSource) -> DraftTree:
        """The chain after ``feedback.token``; see :class:`specmm.drafter.Drafter`."""
        numbers = None if self.processor.greedy else uniforms.draw(self.max_depth)
        with self.clock("draft"):
            first = self.target.cache.size.capacity
            self.bias[..., :first] = self.target.cache.prefix_bias()[:, None, None]
            return self._chain(feedback.token, numbers)

    def _chain(self, root: Tensor, numbers: Tensor | None) -> DraftTree:
        tokens = [root]
        probs: list[Tensor] = []
        states: list[Tensor] = []
        for place in range(self.max_depth):
            logits, state = self.target.logits(self.skip, *self._at(place, tokens[-1]))
            states.append(state)
            q = logits[:, 0] if numbers is None else self.processor(logits[:, 0])
            probs.append(q)
            draft = q.argmax(-1) if numbers is None else categorical(q, numbers[:, place])
            tokens.append(draft)
        if self.common:
            last = self._at(len(states), tokens[-1])
            states.append(self.target.states(self.common, *last))
        self.target.resume(self.common, torch.cat(states, dim=1) if self.common else None)
        recorded = None
        if numbers is not None:
            recorded = torch.stack([torch.zeros_like(probs[0]), *probs], dim=1)  # [B, N, V]
        return DraftTree(torch.stack(tokens, dim=1), self.shape, recorded)

    def _at(self, place: int, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``token`` [B] as the ``place``-th of the chain, the root being 0, for a pass over it: its
        tokens, positions and mask.
        """
        cache = self.target.cache
        slot = cache.size.capacity + place
        cache.aim(slot, slot + 1)
        bias = self.bias[:, :, place : place + 1, : slot + 1]
        return token[:, None], cache.lengths[:, None] + place, bias
