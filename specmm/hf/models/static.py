"""A transformers model with static shapes: one compiled program serves every step or round.

Capacity is rounded up, so that texts of many lengths share a program. A plain step attends to all
slots of the cache under a mask and writes by index; the uncompiled step slices the cache to its
current length.

Shape letters: B batch, R rows (all guidance branches), S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.core.cache import Cache, CacheSize, StaticMemory, branched
from specmm.core.decode import room
from specmm.core.guidance import Guidance
from specmm.core.processors import Processor, extremes
from specmm.core.target import TargetOutput
from specmm.core.tree import DraftTree
from specmm.hf.models.cache_layers import as_transformers
from specmm.hf.models.families import WAYS
from specmm.hf.models.target import Past, ProbsProcessor, VLMTarget
from specmm.hf.pictures.picture_tokens import PictureTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.programs.compiled import NotCompiled, compiled


class CapturedTarget(VLMTarget):
    """A model whose rounds are CUDA graphs (:mod:`specmm.programs.graphs`); plain decoding runs as
    rounds without drafts.

    Calls whose capacity rounds up to the same number share memory.
    """

    memory: tuple[Cache, Past] | None = None

    @torch.inference_mode()
    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        if self.family.turning_point is None:
            longest = room(prompt.room) - prompt.max_new_tokens
            prompt = dataclasses.replace(prompt, longest=longest)
        return super().prefill(prompt, scratch)

    def _new_cache(self, size: CacheSize) -> Cache:
        cache = None if self.memory is None else self.memory[0]
        return Cache.again(cache, size, self.dtype, self.device)

    def _new_past(self, batch: int) -> Past:
        """The cache for the model; kept with our cache, whose memory it views."""
        if self.family.chains_only:  # its states are part of it
            return super()._new_past(batch)
        if self.memory is None or self.memory[0] is not self.cache:
            self.memory = self.cache, super()._new_past(batch)
        return self.memory[1]

    def _probs(self, logits: Tensor, tree: DraftTree | None) -> Tensor:
        return self.processor.probs(logits, self.history, tree)  # in memory of the round's own


class StaticVLMTarget(CapturedTarget):
    """A text model whose plain steps, and rounds on trees of one shape, have the same shapes at
    every call.

    Raises ``ValueError`` for models whose positions depend on the text's length.
    """

    def __init__(
        self, model: PreTrainedModel, processor: ProbsProcessor, name: str = "text"
    ) -> None:
        super().__init__(model, processor, name)
        self._prepare()

    def _prepare(self) -> None:
        """Raise ``NotCompiled`` for unsuitable models; make the step's program."""
        odd = self.family.turning_point is not None or self.family.partial
        odd = odd or None in self.family.layer_sizes
        if odd or self.way != WAYS[0]:
            raise NotCompiled(
                "compiled=True needs full attention, fixed rotary positions and the decoder's "
                f"plain forward, which {self.name} lacks"
            )
        self.program = compiled(_next, self.device)
        self.stepped = False

    @torch.inference_mode()
    def prefill(self, prompt: VLMPrompt, scratch: int) -> TargetOutput:
        """As the parent's; without ``scratch``, plain steps follow."""
        output = super().prefill(prompt, scratch)
        if self.way != WAYS[0]:
            raise NotCompiled(
                f"compiled=True needs rows of one length for {self.name}, got several"
            )
        if self.branches > 1 and self.cache.hidden_prefix is None:  # as where there is padding
            self._hide(torch.zeros(self.cache.size.rows, 1, dtype=torch.bool, device=self.device))
        with torch.inference_mode(False):  # programs write to them
            self.history.tokens = self.history.tokens.clone()
            self.history.lengths = self.history.lengths.clone()
            if not scratch:
                self._begin_steps()
        return output

    def _begin_steps(self) -> None:
        """Make what all plain steps share: the slot that a step writes (``place``, which each step
        sets), the mask, and cache layers that write there.
        """
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.positions = self.begins[:, None].clone()
        begins = branched(self.positions, self.branches)
        shut = torch.arange(self.cache.slots, device=self.device) >= begins  # [R, S]
        if self.cache.hidden_prefix is not None:
            shut = shut | self.cache.hidden_prefix
        bias = torch.zeros(shut.shape, dtype=self.cache.dtype, device=self.device)
        self.bias = bias.masked_fill_(shut, float("-inf"))[:, None, None]
        memories = [StaticMemory(x.keys, x.values, self.place) for x in self.cache.layers]
        self.past = as_transformers(memories, self.family.layer_sizes)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> TargetOutput:
        """One plain step of static shapes."""
        slot = self.prompt.width + self.steps
        self.place.fill_(slot)
        self.bias[..., slot] = 0
        # the first step is uncompiled: facts it caches about the model are then not traced
        output: TargetOutput = (self.program if self.stepped else _next)(self, tokens)
        self.stepped = True
        self.steps += 1
        self.positions += 1
        return output


class StaticPictureTarget(StaticVLMTarget, PictureTarget):
    """``plain`` with steps and rounds of static shapes, for pictures of its layout."""

    processor: Processor
    guidance: Guidance
    static_shapes: ClassVar[bool] = True

    def __init__(self, plain: PictureTarget) -> None:
        options = (plain.processor, plain.guidance, plain.name, plain.layout, plain.example)
        PictureTarget.__init__(self, plain.model, plain.facts, *options)
        self._prepare()
        self.others: dict[Processor, StaticPictureTarget] = {}

    def with_processor(self, processor: Processor) -> StaticPictureTarget:
        """A target of the same model with another processor, made once."""
        if processor not in self.others:
            static = StaticPictureTarget(super().with_processor(processor))
            self.others[processor] = static
        return self.others[processor]


def _next(target: StaticVLMTarget, tokens: Tensor) -> TargetOutput:
    """The output after ``tokens`` [B] at the current place of ``target``."""
    if target.processor.stateful:
        target.history.append(tokens[:, None], torch.ones_like(tokens))
    states = target.states(tokens[:, None], target.positions, target.bias)
    logits = target.head(states)
    guided = target.guided(logits, target.positions)
    probs = target.processor.probs(guided, target.history, None)
    return TargetOutput(probs, states, extremes(logits))
