"""A transformers text model with static shapes, so that a compiler serves every step and every
round of every text.

Room is rounded up, so that texts of many lengths share a program. A plain step attends all slots of
the cache under a mask and writes by index, where the eager one attends the slots there are.

Shape letters: B batch, N tree nodes, S slots, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from specmm.cache import StaticMemory
from specmm.compiled import DeferredStop, compiled
from specmm.decode import room
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import ProbsProcessor, VLMTarget, as_transformers
from specmm.target import TargetOutput
from specmm.tree import DraftTree


class StaticVLMTarget(DeferredStop, VLMTarget):
    """A text model whose plain steps, and rounds on trees of one shape, have the same shapes at
    every call.

    A compiled round cannot stop at logits that are not finite: after it the caller looks
    (``end_round``). Raises ``ValueError`` for models whose positions depend on a text's length.
    """

    def __init__(self, model: Any, processor: ProbsProcessor, name: str = "text") -> None:
        super().__init__(model, processor, name)
        if self.family.turning_point is not None or self.family.window:
            raise ValueError(
                f"compiled=True needs full attention and one set of positions, {name} has others"
            )
        self.program = compiled(_next, True, self.device)

    @torch.inference_mode()
    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        """As the parent's; one without ``scratch`` begins plain steps."""
        output = super().prefill(roomy(prompt), scratch)
        with torch.inference_mode(False):  # programs write to them
            self.history.tokens, self.history.lengths = (
                self.history.tokens.clone(),
                self.history.lengths.clone(),
            )
            if not scratch:
                self._begin_steps(self.prompt)
        return output

    def _begin_steps(self, prompt: VLMPrompt) -> None:
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.positions = prompt.lengths[:, None].clone()
        shut = torch.arange(self.cache.slots, device=self.device) >= prompt.lengths[:, None]
        bias = torch.zeros(shut.shape, dtype=self.cache.data.dtype, device=self.device)
        self.bias = bias.masked_fill_(shut, float("-inf"))[:, None, None]
        self.past = as_transformers(
            [StaticMemory(layer.keys, layer.values, self.place) for layer in self.cache.layers]
        )

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step of static shapes."""
        slot = self.prompt.input_ids.shape[1] + self.calls - 1
        self.place.fill_(slot)
        self.bias[..., slot] = 0
        logits, output = self.program(self, tokens)
        self._count(logits)
        self.positions += 1
        return output

    def _probs(self, logits: Tensor, tree: DraftTree | None) -> Tensor:
        return self.processor.probs(logits, self.history, tree)


def _next(target: StaticVLMTarget, tokens: Tensor) -> tuple[Tensor, TargetOutput]:
    """Logits and output after ``tokens`` [B], at ``target``'s place."""
    if target.processor.stateful:
        target.history.append(tokens[:, None], torch.ones_like(tokens))
    states = target.states(tokens[:, None], target.positions, target.bias)
    logits = target.head(states)
    return logits, TargetOutput(target.processor.probs(logits, target.history, None), states)


def roomy(prompt: VLMPrompt) -> VLMPrompt:
    """``prompt`` with room rounded up."""
    return dataclasses.replace(prompt, longest=room(prompt.room) - prompt.max_new_tokens)
