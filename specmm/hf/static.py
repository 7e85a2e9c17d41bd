"""A transformers text model with static shapes: one compiled program serves every step or round.

Room is rounded up, so that texts of many lengths share a program. A plain step attends all slots of
the cache under a mask and writes by index, where the eager one attends the slots there are.

Shape letters: B batch, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.cache import StaticMemory
from specmm.compiled import DeferredStop, compiled
from specmm.decode import room
from specmm.hf.cache_layers import as_transformers
from specmm.hf.families import WAYS
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import ProbsProcessor, VLMTarget
from specmm.target import TargetOutput
from specmm.tree import DraftTree


class StaticVLMTarget(DeferredStop, VLMTarget):
    """A text model whose plain steps, and rounds on trees of one shape, have the same shapes at
    every call.

    A compiled round cannot stop at logits that are not finite: the caller checks after it
    (``end_round``). Raises ``ValueError`` for models whose positions depend on a text's length.
    """

    def __init__(
        self, model: PreTrainedModel, processor: ProbsProcessor, name: str = "text"
    ) -> None:
        super().__init__(model, processor, name)
        odd = self.family.turning_point is not None or self.family.partial
        odd = odd or None in self.family.layer_sizes
        if odd or self.way != WAYS[0]:
            raise ValueError(
                f"compiled=True needs full attention and one set of positions, {name} has others"
            )
        self.program = compiled(_next, True, self.device)

    @torch.inference_mode()
    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        """As the parent's; one without ``scratch`` begins plain steps."""
        longest = room(prompt.room) - prompt.max_new_tokens
        output = super().prefill(dataclasses.replace(prompt, longest=longest), scratch)
        if self.way != WAYS[0]:
            raise ValueError(f"compiled=True does not serve rows of several lengths of {self.name}")
        with torch.inference_mode(False):  # programs write to them
            self.history.tokens = self.history.tokens.clone()
            self.history.lengths = self.history.lengths.clone()
            if not scratch:
                self._begin_steps(prompt.lengths[:, None])
        return output

    def _begin_steps(self, lengths: Tensor) -> None:
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.positions = lengths.clone()
        shut = torch.arange(self.cache.slots, device=self.device) >= lengths
        bias = torch.zeros(shut.shape, dtype=self.cache.dtype, device=self.device)
        self.bias = bias.masked_fill_(shut, float("-inf"))[:, None, None]
        memories = [StaticMemory(x.keys, x.values, self.place) for x in self.cache.layers]
        self.past = as_transformers(memories, self.family.layer_sizes)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step of static shapes."""
        slot = self.prompt.width + self.calls - 1
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
