"""Models of transformers that draw pictures token by token, as targets.

What such a model must say of itself is a :class:`PictureModel`; nothing else is written for it.

Shape letters: B batch, T tokens of a picture, R pixels a side, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.guidance import AllowedTokens, Guidance
from specmm.hf.families import Family
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import UNGUIDED, VLMTarget
from specmm.processors import Processor

Decoder = Callable[[Tensor], Tensor]
"""Tokens [B, T] to pictures [B, 3, R, R] in [-1, 1]."""


@dataclass(frozen=True)
class PictureModel:
    """The description of a class of transformers that draws pictures; facts are functions of a model.

    ``head`` scores: states [..., C] to logits [..., V]. ``embed`` makes a drawn token an input:
    [...] to [..., C]. ``allowed`` says which tokens may be drawn where. ``decode`` turns tokens into
    pixels, by the model and the files in its folder; it raises ``ValueError`` where they cannot.
    ``grid`` is tokens a side, ``begin`` the ids between prompt and picture, ``cfg`` the usual
    guidance scale. Tokens are ``shared`` where drawn ones have the ids that a prompt would use.
    """

    architecture: str  # the class
    head: Callable[[PreTrainedModel], Callable[[Tensor], Tensor]]
    embed: Callable[[PreTrainedModel], Callable[[Tensor], Tensor]]
    allowed: Callable[[PreTrainedModel], AllowedTokens]
    decode: Callable[[PreTrainedModel, Path], Decoder]
    grid: Callable[[PreTrainedModel], int]
    begin: Callable[[PreTrainedModel], Sequence[int]]
    cfg: float = 1.0
    shared: bool = True


class PictureTarget(VLMTarget):
    """A model of transformers, by its ``facts``, as a target that draws pictures."""

    processor: Processor

    def __init__(
        self,
        model: PreTrainedModel,
        facts: PictureModel,
        processor: Processor,
        guidance: Guidance = UNGUIDED,
        name: str = "pictures",
    ) -> None:
        allowed = facts.allowed(model).to(model.device)
        family = Family(
            model=model,
            body=model.base_model,
            decoder=model.get_decoder(),
            head=facts.head(model),
            embedding=facts.embed(model),
            config=model.config.get_text_config(),
            vocabulary=allowed.masks.shape[-1],
            foreign=True,
            shared=facts.shared,
        )
        super().__init__(model, processor, name, family, guidance, allowed)
        self.grid = facts.grid(model)
        self.length = self.grid**2  # T


def picture_prompt(
    target: PictureTarget, prompts: Sequence[Sequence[int]], negative: Sequence[int]
) -> VLMPrompt:
    """Prompts for pictures from ids that end with those that begin one; ``negative`` is what
    guidance leads away from.
    """
    away = VLMPrompt(padded([list(negative)] * len(prompts)), target.length)
    ids = padded([list(row) for row in prompts])
    other = away if target.guidance.branches > 1 else None
    return VLMPrompt(ids, target.length, unconditional=other).to(target.device, torch.float32)
