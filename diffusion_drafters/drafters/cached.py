"""A block source that never reads a token twice: DEER drafters with a causal prefix.

Each round one forward reads [the tokens committed last round | masks]; the former stay in the drafter's cache, the
masks leave no trace.

Shape letters: B batch, K block, M committed tokens of a round, N = M + K - 1 positions of a forward, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.diffusion_drafters.drafters.sources import ends_with, shared_tokens
from specmm.diffusion_drafters.laws import Follow, Known
from specmm.diffusion_drafters.models.causal import CausalPrefix
from specmm.drafter import Feedback
from specmm.processors import Processor
from specmm.vlm.prompt import VLMPrompt
from specmm.vlm.target import VLMTarget
from specmm.vlm.translation import Translation


class CausalSource:
    """Blocks of a :class:`CausalPrefix` for ``target``; ``translation`` as for a diffusion language model."""

    longest: int | None
    follow: Follow | None = None

    def __init__(self, model: CausalPrefix, target: VLMTarget, translation: Translation | None = None) -> None:
        self.model, self.target, self.longest = model, target, model.block
        self.translation = shared_tokens(translation, model.vocabulary, model.mask, target)
        self.end, self.known = ends_with(self.translation, model.end), Known(target.family.vocabulary)
        self.small = VLMTarget(model.model, Processor(), "drafter")
        self.head = target.head if model.shared else self.small.head  # as trained: some targets scale or cap logits
        self.seen: dict[tuple[int, int], Tensor] = {}  # masks of forwards whose rows committed alike

    def begin(self, feedback: Feedback, most: int) -> None:
        """Read the prompts. Raises ``ValueError`` when they and the answer exceed the drafter's positions."""
        prompt = self.target.prompt
        needed = prompt.room + most
        if needed > self.model.room:
            raise ValueError(
                f"prompt, answer and block must fit the drafter's {self.model.room} positions, got {needed}; "
                "shorten one of them or use another method"
            )
        self.small.prefill(self._own(prompt), 2 * most + 1)

    def admit(self, row: int) -> None:
        """Read the prompt admitted."""
        self.small.admit(row, self._own(self.target.admitted.prompt))

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """Logits [B, K, V] of the block; see :class:`BlockSource`."""
        tokens, kept = feedback.token[:, None], torch.ones_like(feedback.token)
        if feedback.verdict is not None and feedback.tokens is not None:
            kept = feedback.verdict.kept
            tokens = feedback.tokens[:, : int(kept.max().clamp(min=1))]
        states = self._read(self.translation.to_drafter(tokens), kept, block)
        return self.translation.from_drafter(self.head(states).float())

    def _own(self, prompt: VLMPrompt) -> VLMPrompt:
        """``prompt`` in the drafter's tokens."""
        ids = self.translation.to_drafter(prompt.input_ids)
        inputs = {"input_ids": ids, "attention_mask": prompt.inputs["attention_mask"]}
        return VLMPrompt(inputs, prompt.max_new_tokens, longest=prompt.longest)

    def _read(self, tokens: Tensor, kept: Tensor, block: int) -> Tensor:
        """States [B, K, C] of the last of ``kept`` [B] of ``tokens`` [B, M] and of the masks behind it."""
        cache, (rows, count) = self.small.cache, tokens.shape
        order = torch.arange(count + block - 1, device=tokens.device)
        masks = tokens.new_full((rows, block - 1), self.model.mask)
        depths = torch.where(order < count, order, order - count + kept[:, None])  # [B, N]
        cache.aim(cache.size.capacity, cache.slots)
        bias = cache.tree_bias(self._ancestors(count, block, kept))
        states = self.small.states(torch.cat([tokens, masks], dim=1), cache.lengths[:, None] + depths, bias)
        cache.keep(order[:count].expand(rows, -1), kept)
        last = (kept - 1).clamp(min=0)[:, None]
        wanted = torch.cat([last, order[count:].expand(rows, -1)], dim=1)
        return states.gather(1, wanted[..., None].expand(-1, -1, states.shape[-1]))

    def _ancestors(self, count: int, block: int, kept: Tensor) -> Tensor:
        """Who sees whom of a forward [1 or B, N, N]: tokens those before them, masks the kept tokens and each other."""
        alike = bool((kept == count).all())
        if not alike or (count, block) not in self.seen:
            size = count + block - 1
            order = torch.arange(size, device=kept.device)
            fresh = (order < kept[:, None]) | (order >= count)  # [B, N]
            seen = (order <= order[:, None]) | (order[:, None] >= count)
            seen = seen & (fresh[:, None] | (order[:, None] < count))
            if not alike:
                return seen
            self.seen[count, block] = seen[:1]
        return self.seen[count, block]
