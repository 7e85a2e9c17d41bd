"""The interface of targets that draw pictures token by token, for drafters and methods.

Shape letters: B batch, G guidance branches, R = G·B rows, N tokens, T tokens of a picture, C width,
F layers read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from specmm.core.guidance import AllowedTokens, Guidance
from specmm.core.processors import Processor
from specmm.core.target import Target


class DrawingTarget(Target, Protocol):
    """A target that draws pictures of ``length`` tokens.

    ``prompted``: its prompts are token ids, which lookups may search. ``static_shapes``: its rounds
    can be compiled.
    """

    model: Any  # the network
    processor: Processor
    prompted: ClassVar[bool]
    static_shapes: ClassVar[bool]

    @property
    def guidance(self) -> Guidance:
        """How the logits of its branches are mixed."""

    @property
    def length(self) -> int:
        """T."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""

    @property
    def columns(self) -> int:
        """Picture tokens a row."""

    @property
    def line(self) -> int:
        """Tokens a row, its end token included."""

    @property
    def allowed(self) -> AllowedTokens | None:
        """The tokens allowed at each place; None: all tokens everywhere."""

    @property
    def vocabulary(self) -> int:
        """V."""

    @property
    def codes(self) -> int:
        """The number of tokens that are codes of the image tokenizer."""

    @property
    def undrawable(self) -> int | None:
        """A token that is allowed nowhere; None if there is none."""

    def read_layers(self, layers: Sequence[int]) -> None:
        """Append the inputs of ``layers`` to the hidden states of later outputs: [R, N, C·(1 + F)].

        Raises ``ValueError`` for layers that the model does not have.
        """

    def with_processor(self, processor: Processor) -> DrawingTarget:
        """A target of the same model with another processor."""

    def any_prompt(self, batch: int) -> Any:
        """Prompts for ``batch`` pictures to measure on."""
