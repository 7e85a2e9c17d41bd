"""Block sources that read each token once and cache its keys and values.

In each round one forward reads [tokens committed last round | masks]; the tokens stay in the
drafter's cache, the masks do not. DEER drafters were trained in this way.

Shape letters: B batch, K block, M committed tokens of a round, N = M + masks positions of a
forward, C width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmm.core.drafter import DrafterVocabulary, Feedback
from specmm.core.processors import Processor
from specmm.diffusion_drafters.models.deer import DEERModel, share
from specmm.diffusion_drafters.sources import NextLogits, end_token, shared_tokens
from specmm.hf.drafters.translation import Translation
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt


def scoring_states(states: Tensor, kept: Tensor, count: int, block: int) -> Tensor:
    """The K = ``block`` of a forward's ``states`` [B, N, C] that score the block after ``kept``
    accepted tokens: the last accepted token's state, and the masks' states, which come after all
    ``count`` tokens.
    """
    order = torch.arange(count, count + block - 1, device=states.device).expand(len(states), -1)
    last = (kept - 1).clamp(min=0)[:, None]
    slots = torch.cat([last, order], dim=1)
    return states.gather(1, slots[..., None].expand(-1, -1, states.shape[-1]))


def check_room(prompt: VLMPrompt, most: int, room: int) -> None:
    """Raise ``ValueError`` when ``prompt``, its answer and a block of ``most`` exceed ``room``."""
    needed = prompt.room + most
    if needed > room:
        raise ValueError(
            f"prompt, answer and block must fit the drafter's {room} positions, got {needed}; "
            "shorten one of them or use another method"
        )


def drafter_prompt(prompt: VLMPrompt, translation: Translation) -> VLMPrompt:
    """``prompt`` in the drafter's tokens."""
    inputs = {
        "input_ids": translation.to_drafter(prompt.input_ids),
        "attention_mask": prompt.inputs["attention_mask"],
    }
    return VLMPrompt(inputs, prompt.max_new_tokens, longest=prompt.longest)


class CausalSource:
    """Blocks of a DEER drafter for ``target``, which attends causally."""

    longest: int | None
    next_logits: NextLogits | None = None

    def __init__(self, model: DEERModel, target: VLMTarget) -> None:
        self.model = model
        self.target = target
        self.longest = model.block
        self.translation = shared_tokens(None, model.vocabulary, model.mask, target)
        self.end = end_token(self.translation, model.end)
        self.vocabulary = DrafterVocabulary(target.family.vocabulary)
        self.small = VLMTarget(model.model, Processor(), "drafter")
        # Masks of forwards whose rows all committed the same number of tokens.
        self.attention: dict[tuple[int, int], Tensor] = {}
        # As in training: some targets scale or cap their logits.
        self.head = target.head if model.shared else self.small.head

    def begin(self, feedback: Feedback, most: int) -> None:
        """See :class:`BlockSource`. Raises ``ValueError`` for more than the drafter's positions."""
        check_room(self.target.prompt, most, self.model.room)
        if self.model.shared:  # the target may have other tensors than before
            share(self.model.model, self.target.model)
        prompt = drafter_prompt(self.target.prompt, self.translation)
        self.small.prefill(prompt, 2 * most + 1)

    def start_row(self, row: int) -> None:
        prompt = drafter_prompt(self.target.started.prompt, self.translation)
        self.small.start_row(row, prompt)

    def logits(self, feedback: Feedback, block: int) -> Tensor:
        """Logits [B, K, V] of a block after the latest tokens; see :class:`BlockSource`."""
        tokens = feedback.token[:, None]
        kept = torch.ones_like(feedback.token)
        if feedback.result is not None and feedback.tokens is not None:
            kept = feedback.result.kept
            tokens = feedback.tokens[:, : int(kept.max().clamp(min=1))]
        states = self.read(self.translation.to_drafter(tokens), kept, block - 1)
        states = scoring_states(states, kept, tokens.shape[1], block)
        return self.translation.from_drafter(self.head(states).float())

    def read(self, tokens: Tensor, kept: Tensor, masks: int) -> Tensor:
        """States [B, N, C] of ``tokens`` [B, M], the first ``kept`` [B] of which stay in the cache,
        and of ``masks`` after those.
        """
        cache = self.small.cache
        rows, count = tokens.shape
        order = torch.arange(count + masks, device=tokens.device)
        ids = torch.cat([tokens, tokens.new_full((rows, masks), self.model.mask)], dim=1)
        depths = torch.where(order < count, order, order - count + kept[:, None])  # [B, N]
        cache.aim_at_tree(count + masks)
        bias = cache.tree_bias(self._ancestors(count, masks, kept))
        states = self.small.states(ids, cache.lengths[:, None] + depths, bias)
        cache.keep(order[:count].expand(rows, -1), kept)
        return states

    def _ancestors(self, count: int, masks: int, kept: Tensor) -> Tensor:
        """Attention mask [1 or B, N, N]: masks attend to the accepted tokens and to each other."""
        alike = bool((kept == count).all())
        if not alike or (count, masks) not in self.attention:
            order = torch.arange(count + masks, device=kept.device)
            fresh = (order < kept[:, None]) | (order >= count)  # [B, N]
            visible = torch.where(order[:, None] >= count, fresh[:, None], order <= order[:, None])
            if not alike:
                return visible
            self.attention[count, masks] = visible[:1]
        return self.attention[count, masks]
