"""The target as its own drafter, with some of its layers left out.

The first layers alone are LayerSkip's early exit (arXiv 2404.16710), any others left out Draft &
Verify (arXiv 2309.08168). There is no second model and no second cache: a drafting pass attends the
keys and values that the target has committed, and writes those of its drafts into the scratch
slots, which verification then writes anew.

The layers before the first one left out compute for a draft what the whole target would. So all
drafts go through these, the last one too, and verification goes on from there. To look at a token's
draft, and to do without it where the draft is unsure, then costs nothing but the head.

Shape letters: B batch, G guidance branches, R = G·B rows, n nodes, D drafts, S slots, C width, V
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.drafter import Feedback
from specmm.layered import Layered, Skip
from specmm.methods import check_sure
from specmm.processors import Processor
from specmm.randomness import UniformSource, categorical
from specmm.shape.blocks import adaedl_stop
from specmm.stats import Clock
from specmm.tree import DraftTree, TreeShape


class SelfDrafter:
    """Chains of at most ``length`` drafts by the target without the layers ``skip``.

    Drafts are drawn from ``processor``'s distributions, which are recorded; where it is greedy they
    are the likeliest tokens, as point masses. ``sure`` above 0 ends a chain in front of the first
    token whose distribution promises less acceptance (AdaEDL's bound, arXiv 2410.18351), before it
    is drawn. All rows of a batch stay as long as the longest; where drafts are drawn a batch of
    several rows is never cut, for a row's uniforms must not depend on the others. Raises
    ``ValueError`` for a length below 1 and a bound outside [0, 1].
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
        check_sure(sure)
        self.target = target
        self.processor = processor
        self.skip = skip
        self.sure = sure
        self.max_depth = length
        self.max_nodes = length + 1
        self.shapes = [TreeShape.chain(n, device) for n in range(length + 1)]

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
        self.gated = self.processor.greedy or len(feedback.token) == 1

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
        ended = torch.zeros_like(root, dtype=torch.bool)
        for place in range(self.max_depth):
            logits, state = self.target.logits(self.skip, *self._at(place, tokens[-1]))
            states.append(state)
            q = self._probs(logits[:, 0], numbers)
            if self.sure and self.gated:
                ended = ended | adaedl_stop(q, self.sure)
                if bool(ended.all()):
                    break
            probs.append(q)
            draft = q.argmax(-1) if numbers is None else categorical(q, numbers[:, place])
            tokens.append(draft)
        if self.common and len(states) < len(tokens):
            last = self._at(len(states), tokens[-1])
            states.append(self.target.states(self.common, *last))
        self.target.resume(self.common, torch.cat(states, dim=1) if self.common else None)
        return self._tree(tokens, None if numbers is None else probs)

    def _probs(self, logits: Tensor, numbers: Tensor | None) -> Tensor:
        """The distribution [B, V] of ``logits`` [B, V]; where nothing is drawn, what has the same
        likeliest token and says how sure it is.
        """
        if numbers is not None:
            return self.processor(logits)
        return logits.float().softmax(-1) if self.sure else logits

    def _tree(self, tokens: list[Tensor], probs: list[Tensor] | None) -> DraftTree:
        shape = self.shapes[len(tokens) - 1]
        recorded = None
        if probs:
            recorded = torch.stack([torch.zeros_like(probs[0]), *probs], dim=1)  # [B, N, V]
        return DraftTree(torch.stack(tokens, dim=1), shape, recorded)

    def _at(self, place: int, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``token`` [B] as the ``place``-th of the chain, the root being 0, for a pass over it: its
        tokens, positions and mask.
        """
        cache = self.target.cache
        slot = cache.size.capacity + place
        cache.aim(slot, slot + 1)
        bias = self.bias[:, :, place : place + 1, : slot + 1]
        return token[:, None], cache.lengths[:, None] + place, bias
