"""A ragged batch of prompts as a transformers processor gives it, its padding moved to the right.

On the right, a causal mask hides the padding by itself, row b's token j lies in cache slot j, and a
row's numbers do not depend on how long the others are.

Shape letters: B batch, L longest prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
POSITIONS = "position_ids"  # of M-RoPE [3 or 4, B, L], the last three rows count


class Source(Protocol):
    """What was asked, which another processor can read as well."""

    def inputs(self, processor: Any) -> dict[str, Any]:
        """What ``processor`` makes of it: ``input_ids`` [B, L] and the rest, as tensors."""
        ...


@dataclass
class VLMPrompt:
    """``inputs`` as the processor gives them (``input_ids`` [B, L], ``pixel_values``,
    ``image_grid_thw``, …) and the number of tokens there must be room for. Raises ``ValueError``
    when there is nothing to continue.
    """

    inputs: dict[str, Any]
    max_new_tokens: int
    source: Source | None = None  # for drafters with a processor of their own
    longest: int = 0  # tokens of the longest prompt that a row may begin anew with

    def __post_init__(self) -> None:
        ids = self.inputs["input_ids"]
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.inputs.get("attention_mask") is None:
            self.inputs = {**self.inputs, "attention_mask": torch.ones_like(ids)}
        mask = self.inputs["attention_mask"].bool()
        if ids.ndim != 2 or not ids.numel() or not bool(mask.any(1).all()):
            raise ValueError(
                f"every prompt must hold at least one token, got input_ids of shape {list(ids.shape)}"
            )
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # tokens first, in their order
        moved = {
            k: self.inputs[k].gather(1, order) for k in PER_TOKEN if self.inputs.get(k) is not None
        }
        if self.inputs.get(POSITIONS) is not None:
            moved[POSITIONS] = self.inputs[POSITIONS][-3:].gather(2, order.expand(3, -1, -1))
        self.inputs = {**self.inputs, **moved}

    @property
    def input_ids(self) -> Tensor:
        """Token ids [B, L]; padding at the right."""
        return self.inputs["input_ids"]

    @property
    def mask(self) -> Tensor:
        """Which positions are tokens [B, L] bool."""
        return self.inputs["attention_mask"].bool()

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each row [B]."""
        return self.mask.sum(1)

    @property
    def room(self) -> int:
        """Tokens that a row may come to hold."""
        return max(self.input_ids.shape[1], self.longest) + self.max_new_tokens

    @cached_property
    def padded(self) -> bool:
        """Whether the rows differ in length."""
        return not bool(self.mask.all())

    @property
    def vision(self) -> dict[str, Any]:
        """Everything but the tokens: pixels, grids, sizes."""
        return {k: v for k, v in self.inputs.items() if k not in (*PER_TOKEN, POSITIONS)}

    def next_positions(self) -> Tensor:
        """Under M-RoPE with given positions: that of the token after each row [B]."""
        given: Tensor = self.inputs[POSITIONS]
        return given.amax(0).masked_fill(~self.mask, -1).amax(1) + 1

    def extended(self, tokens: Tensor) -> VLMPrompt:
        """With one more of ``tokens`` [B] after each row, and room for one less."""
        inputs = dict(self.inputs)
        if inputs.get(POSITIONS) is not None:
            where = self.lengths.expand(3, -1)[..., None]
            longer = torch.nn.functional.pad(inputs[POSITIONS], (0, 1))
            inputs[POSITIONS] = longer.scatter(
                2, where, self.next_positions().expand(3, -1)[..., None]
            )
        new_values = (
            ("input_ids", tokens),
            ("attention_mask", 1),
            ("mm_token_type_ids", 0),
            ("token_type_ids", 0),
        )
        for key, value in new_values:
            if inputs.get(key) is not None:
                longer = torch.nn.functional.pad(inputs[key], (0, 1))
                new = torch.as_tensor(value, dtype=longer.dtype, device=longer.device).expand(
                    len(longer)
                )
                inputs[key] = longer.scatter(1, self.lengths[:, None], new[:, None])
        return VLMPrompt(inputs, max(self.max_new_tokens - 1, 1), self.source)

    def to(self, device: torch.device, dtype: torch.dtype) -> VLMPrompt:
        """The same on ``device``, pixels in ``dtype``."""
        return VLMPrompt(
            on_device(self.inputs, device, dtype), self.max_new_tokens, self.source, self.longest
        )

    def rows(self) -> list[list[int]]:
        """The token ids of each row, without padding."""
        return [
            ids[:n] for ids, n in zip(self.input_ids.tolist(), self.lengths.tolist(), strict=True)
        ]


def on_device(
    inputs: dict[str, Any], device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """``inputs`` with every tensor on ``device`` and pixels (what is fractional) in ``dtype``."""
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in moved.items()
    }
