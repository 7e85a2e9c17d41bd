"""LlamaGen with static shapes, so that a compiler or a captured graph serves every step and every
round.

A plain step attends all slots of the cache under a mask and writes by index, where the eager one
attends the committed slots only and needs no mask. Shape letters: R rows, S slots, H heads, D head
width, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specmm.cache import Cache, StaticMemory
from specmm.compiled import DeferredStop, compiled
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.processors import Processor
from specmm.target import TargetOutput
from specmm.tree import DraftTree


class StaticTarget(DeferredStop, LlamaGenTarget):
    """A class-conditional target whose plain step has the same shapes, and the same memory, at
    every call.

    ``transform`` turns the step's function into a faster one. A compiled program cannot stop at
    logits that are not finite: after a round the caller looks (``end_round``).
    """

    def __init__(self, plain: LlamaGenTarget, transform: Callable[[Any], Any] = compiled) -> None:
        if plain.model.config.model_type != "c2i":
            raise ValueError(
                "steps and rounds of static shapes serve class-conditional models only"
            )
        super().__init__(plain.model, plain.guidance, plain.processor, plain.name)
        self.kept: Cache | None = None
        self.run = transform(self.logits_of)

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, scratch: int) -> TargetOutput:
        """As the parent's, then moved into the memory of the first call, which steps go on using."""
        output = super().prefill(prompt, scratch)
        if self.kept is None or self.kept.data.shape != self.cache.data.shape:
            self.kept = self.cache
            device = self.cache.lengths.device
            self.place = torch.zeros(1, dtype=torch.int64, device=device)
            self.columns = torch.arange(self.cache.slots, device=device)
            self.memories = [
                StaticMemory(layer[0], layer[1], self.place) for layer in self.cache.data
            ]
        else:
            self.kept.data.copy_(self.cache.data)
            self.kept.lengths.copy_(self.cache.lengths)
            self.cache = self.kept
        return output

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step of static shapes."""
        self.place.fill_(self.model.config.cls_token_num + self.calls - 1)
        guided, hidden = self.run(tokens)
        self._count(guided)
        self.cache.lengths += 1
        return TargetOutput(self.processor(guided), hidden)

    def score(self, tree: DraftTree) -> TargetOutput:
        """One tree-attention forward, in whatever mode it is called: one that begins in a program
        breaks it.
        """
        return self._scored(tree)

    def logits_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Guided logits [B, 1, V] and hidden states [R, 1, C] after ``tokens`` [B] at ``place``."""
        x = self.model.tok_embeddings(tokens[:, None]).repeat(self.guidance.branches, 1, 1)
        shut = self.columns > self.place
        bias = torch.zeros_like(shut, dtype=x.dtype).masked_fill(shut, float("-inf"))[
            None, None, None
        ]
        logits, hidden = self.model(x, self.place[None], bias, self.memories)
        return self.guide(logits.float(), self.place[None]), hidden

    def with_processor(self, processor: Processor) -> StaticTarget:
        """The same model under another processor, with memory and programs of its own."""
        return type(self)(super().with_processor(processor))
