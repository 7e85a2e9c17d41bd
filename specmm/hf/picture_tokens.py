"""Models of transformers that draw pictures token by token, as targets.

What such a model must say of itself is a :class:`PictureModel`; nothing else is written for it.

Shape letters: B batch, T tokens of a picture, H and W pixels of its sides, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.cache import branched
from specmm.guidance import AllowedTokens, Guidance
from specmm.hf.families import Family
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.target import TargetOutput

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Layout:
    """How a picture is drawn: ``rows`` of so many ``columns`` of picture tokens.

    ``length`` T are all tokens drawn, with those that end a row, where ``allowed`` says which.
    """

    rows: int
    columns: int
    length: int
    allowed: AllowedTokens


Decoder = Callable[[Tensor, Layout], Tensor]
"""Tokens [B, T] to pictures [B, 3, H, W] in [-1, 1]."""


@dataclass(frozen=True)
class PictureModel:
    """A class of transformers that draws pictures, described by functions of a model.

    ``head`` scores: states [..., C] to logits [..., V]. ``embed`` makes drawn tokens inputs: [...]
    to [..., C]. Both are the model's own by default. ``layout`` tells what a picture of some size
    is made of (None: the usual size), and raises ``ValueError`` for one that the model does not
    draw. ``ids`` are those of a prompt up to the first token drawn, by the model's tokenizer;
    ``away``, where it is given, makes of them the prompt that guidance leads away from, and else
    that is the empty one. ``decode`` gives what turns tokens into pixels, from the model and the
    files in its folder, or raises ``ValueError``. ``cfg`` is the usual guidance scale. Tokens are
    ``shared`` where drawn ones have the ids that a prompt would use.
    """

    architecture: str  # the class
    layout: Callable[[Any, Size | None], Layout]
    ids: Callable[[Any, Any, str, Layout], list[int]]
    decode: Callable[[Any, Path], Decoder]
    away: Callable[[Any, Any, Sequence[int]], list[int]] | None = None
    head: Callable[[Any], Callable[[Tensor], Tensor]] = lambda model: model.get_output_embeddings()
    embed: Callable[[Any], Callable[[Tensor], Tensor]] = lambda model: model.get_input_embeddings()
    cfg: float = 1.0
    shared: bool = True


class PictureTarget(VLMTarget):
    """A model of transformers, by its ``facts``, as a target that draws pictures of ``layout``."""

    processor: Processor
    guidance: Guidance

    def __init__(
        self,
        model: PreTrainedModel,
        facts: PictureModel,
        processor: Processor,
        guidance: Guidance,
        name: str = "pictures",
        layout: Layout | None = None,
    ) -> None:
        self.layout = layout or facts.layout(model, None)
        allowed = self.layout.allowed.to(model.device)
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
        self.length = self.layout.length  # T
        self.columns = self.layout.columns
        self.line = self.length // self.layout.rows

    @torch.inference_mode()
    def step_at(self, tokens: Tensor, places: Tensor, seen: Tensor) -> TargetOutput:
        """A plain step of ``tokens`` [B, N] put at ``places`` [N] of the picture, of which each
        sees ``seen`` [N, T] bool.

        Raises ``ValueError`` for a model whose layers need their tokens in order.
        """
        if self.family.partial or self.family.chains_only or self.family.mrope:
            raise ValueError(
                f"zipar cannot draw with {self.name}: it has layers with states or that attend "
                "part of the text, or M-RoPE; use sjd"
            )
        first = self.prompt.width
        column = torch.arange(first + self.length, device=self.device)
        hidden = branched((column >= self.begins[:, None]) & (column < first), self.branches)
        if self.cache.hidden_prefix is not None:
            hidden = hidden | self.cache.hidden_prefix[:, : len(column)]
        bias = self.cache.aim_at_places(first, places, seen, hidden)
        positions = self.begins[:, None] + places
        states = self.states(tokens, positions, bias)
        return self._output(states, states, None, positions)


def picture_prompt(
    target: PictureTarget, prompts: Sequence[Sequence[int]], away: Sequence[Sequence[int]]
) -> VLMPrompt:
    """Prompts for pictures from ids that end with those that begin one, and for each what guidance
    leads ``away`` from.
    """
    other = None
    if target.branches > 1:
        other = VLMPrompt(padded([list(row) for row in away]), target.length)
    ids = padded([list(row) for row in prompts])
    return VLMPrompt(ids, target.length, unconditional=other).to(target.device, torch.float32)


def square(tokens: int, size: Size | None, side: int, allowed: AllowedTokens) -> Layout:
    """The layout of a model that draws squares of so many ``tokens`` and ``side`` pixels alone.

    Raises ``ValueError`` for another ``size``, and for tokens that fill no square.
    """
    if size is not None and size != (side, side):
        raise ValueError(
            f"height and width must be {side} for this model, got {size[0]} and {size[1]}"
        )
    rows = round(tokens**0.5)
    if rows**2 != tokens:
        raise ValueError(f"a picture must have a square number of tokens, got {tokens}")
    return Layout(rows, rows, tokens, allowed)
