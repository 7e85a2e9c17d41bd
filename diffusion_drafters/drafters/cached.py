"""Block sources that never read a token twice: each round one forward reads [tokens committed last
round | masks]; the former stay in the drafter's cache, the masks leave no trace.

DEER drafters were trained to read a text so. Dream and LLaDA let every token see all others, masks
too: what is kept of a token was computed when it was new, so their drafts are others than without a
cache. Drafts may be anything.

Shape letters: B batch, K block, M committed tokens of a round, N = M + masks positions of a
forward, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmm.diffusion_drafters.drafters.sources import DiffusionSource, ends_with, shared_tokens
from specmm.diffusion_drafters.models.bidirectional import FullAttention
from specmm.diffusion_drafters.models.causal import CausalPrefix
from specmm.diffusion_drafters.recorded_drafts import DrafterVocabulary, NextLogits
from specmm.drafter import Feedback
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.hf.translation import Translation
from specmm.processors import Processor


class Reader:
    """A drafter's ``model`` with a cache. Tokens see those before them, or with ``both`` sides all
    of their forward.
    """

    def __init__(self, model: Any, mask: int, both: bool) -> None:
        self.small, self.mask, self.both = VLMTarget(model, Processor(), "drafter"), mask, both
        self.seen: dict[
            tuple[int, int], Tensor
        ] = {}  # masks of forwards whose rows committed alike

    def read(self, tokens: Tensor, kept: Tensor, masks: int) -> Tensor:
        """States [B, N, C] of ``tokens`` [B, M], the first ``kept`` [B] of which stay, and of
        ``masks`` after.
        """
        cache, (rows, count) = self.small.cache, tokens.shape
        order = torch.arange(count + masks, device=tokens.device)
        ids = torch.cat([tokens, tokens.new_full((rows, masks), self.mask)], dim=1)
        depths = torch.where(order < count, order, order - count + kept[:, None])  # [B, N]
        cache.aim(cache.size.capacity, cache.slots)
        bias = cache.tree_bias(self._ancestors(count, masks, kept))
        states = self.small.states(ids, cache.lengths[:, None] + depths, bias)
        cache.keep(order[:count].expand(rows, -1), kept)
        return states

    def _ancestors(self, count: int, masks: int, kept: Tensor) -> Tensor:
        """Who sees whom of a forward [1 or B, N, N]: masks the kept tokens and each other, tokens
        see as they may.
        """
        alike = bool((kept == count).all())
        if not alike or (count, masks) not in self.seen:
            order = torch.arange(count + masks, device=kept.device)
            fresh = (order < kept[:, None]) | (order >= count)  # [B, N]
            free = (order[:, None] >= count) | self.both
            seen = torch.where(free, fresh[:, None], order <= order[:, None])
            if not alike:
                return seen
            self.seen[count, masks] = seen[:1]
        return self.seen[count, masks]


def behind(states: Tensor, kept: Tensor, count: int, block: int, shift: int) -> Tensor:
    """Of a forward's ``states`` [B, N, C] of ``count`` tokens and then masks, the K that score the
    ``block`` after ``kept``: masks, and where a row scores the token after it (``shift`` 1) the
    last token kept and a mask fewer.
    """
    order = torch.arange(count, count + block - shift, device=states.device).expand(len(states), -1)
    last = (kept - 1).clamp(min=0)[:, None]
    wanted = torch.cat([last, order], dim=1) if shift else order
    return states.gather(1, wanted[..., None].expand(-1, -1, states.shape[-1]))


def check_room(prompt: VLMPrompt, most: int, room: int) -> None:
    """Raise ``ValueError`` when ``prompt``, its answer and a block of ``most`` exceed a drafter's
    ``room``.
    """
    needed = prompt.room + most
    if needed > room:
        raise ValueError(
            f"prompt, answer and block must fit the drafter's {room} positions, got {needed}; "
            "shorten one of them or use another method"
        )


def own_tokens(prompt: VLMPrompt, translation: Translation) -> VLMPrompt:
    """``prompt`` in the drafter's tokens."""
    inputs = {
        "input_ids": translation.to_drafter(prompt.input_ids),
        "attention_mask": prompt.inputs["attention_mask"],
    }
    return VLMPrompt(inputs, prompt.max_new_tokens, longest=prompt.longest)


class CausalSource:
    """Blocks of a :class:`CausalPrefix` for ``target``; ``translation`` as for a diffusion language
    model.
    """

    longest: int | None
    follow: NextLogits | None = None

    def __init__(
        self, model: CausalPrefix, target: VLMTarget, translation: Translation | None = None
    ) -> None:
        self.model, self.target, self.longest = model, target, model.block
        self.translation = shared_tokens(translation, model.vocabulary, model.mask, target)
        self.end, self.known = (
            ends_with(self.translation, model.end),
            DrafterVocabulary(target.family.vocabulary),
        )
        self.reader = Reader(model.model, model.mask, both=False)
        self.head = (
            target.head if model.shared else self.reader.small.head
        )  # as trained: some scale or cap logits

    def begin(self, feedback: Feedback, most: int) -> None:
        """Read the prompts. Raises ``ValueError`` when they and the answer exceed the drafter's
        positions.
        """
        check_room(self.target.prompt, most, self.model.room)
        self.reader.small.prefill(own_tokens(self.target.prompt, self.translation), 2 * most + 1)

    def start_row(self, row: int) -> None:
        """Read the prompt admitted."""
        self.reader.small.start_row(row, own_tokens(self.target.started.prompt, self.translation))

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """Logits [B, K, V] of the block; see :class:`BlockSource`."""
        tokens, kept = feedback.token[:, None], torch.ones_like(feedback.token)
        if feedback.result is not None and feedback.tokens is not None:
            kept = feedback.result.kept
            tokens = feedback.tokens[:, : int(kept.max().clamp(min=1))]
        states = self.reader.read(self.translation.to_drafter(tokens), kept, block - 1)
        states = behind(states, kept, tokens.shape[1], block, shift=1)
        return self.translation.from_drafter(self.head(states).float())


class KeptSource(DiffusionSource):
    """Blocks of Dream or LLaDA for ``target`` with their keys and values kept, as
    ``DiffuSpec(reuse=True)`` asks.
    """

    model: FullAttention

    def __init__(
        self, model: FullAttention, target: VLMTarget, translation: Translation | None = None
    ) -> None:
        super().__init__(model, target, translation)
        self.reader = Reader(model.model, model.mask, both=True)

    def begin(self, feedback: Feedback, most: int) -> None:
        """Make room. Raises ``ValueError`` when prompts and answer exceed the drafter's positions."""
        super().begin(feedback, most)
        prompt = self.target.prompt
        check_room(prompt, most, self.model.room)
        whole = prompt.input_ids.shape[1] + 1 + most  # what the first round reads
        self.reader.small.make_room(own_tokens(prompt, self.translation), max(whole, 2 * most + 1))

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """Logits [B, K, V] of the block; see :class:`BlockSource`."""
        if feedback.result is not None and feedback.tokens is not None:
            self.history.append(feedback.tokens, feedback.result.kept)
        first = self.reader.small.cache.lengths.clone()
        kept = self.history.lengths - first
        order = torch.arange(int(kept.max().clamp(min=1)), device=kept.device)
        where = (first[:, None] + order).clamp(max=self.history.tokens.shape[1] - 1)
        tokens = self.translation.to_drafter(self.history.tokens.gather(1, where))
        states = self.reader.read(tokens, kept, block)
        states = behind(states, kept, tokens.shape[1], block, self.model.shift)
        return self.translation.from_drafter(self.model.head(states).float())
