"""A ragged batch of prompts as a transformers processor gives it, its padding moved to the right.

With padding on the right the causal mask alone hides it, row b's token j is in cache slot j, and a
row's numbers do not depend on the other rows' lengths.

Shape letters: B batch, R = 2·B rows of two guidance branches, L longest prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
PER_TOKEN = ("input_ids", "attention_mask", *TYPES)
POSITIONS = "position_ids"  # M-RoPE's are [3 or 4, B, L]: the last three rows count


class Source(Protocol):
    """The source of a prompt, which another model's processor can read, too."""

    def inputs(self, processor: Any) -> dict[str, Any]:
        """The output of ``processor`` for it: ``input_ids`` [B, L] and the rest, as tensors."""


@dataclass
class VLMPrompt:
    """A processor's ``inputs`` (``input_ids`` [B, L], ``pixel_values``, ``image_grid_thw``, …) and
    the number of new tokens to make room for.

    ``unconditional`` is guidance's other prompt, of text alone. Raises ``ValueError`` for an empty
    prompt.
    """

    inputs: dict[str, Any]
    max_new_tokens: int
    source: Source | None = None  # for drafters with a processor of their own
    longest: int = 0  # tokens of the longest prompt that a row may restart with
    unconditional: VLMPrompt | None = None

    def __post_init__(self) -> None:
        ids = self.inputs["input_ids"]
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.inputs.get("attention_mask") is None:
            self.inputs = {**self.inputs, "attention_mask": torch.ones_like(ids)}
        mask = self.inputs["attention_mask"].bool()
        if ids.ndim != 2 or not ids.numel() or not bool(mask.any(1).all()):
            raise ValueError(
                "every prompt must hold at least one token, got input_ids of shape "
                f"{list(ids.shape)}"
            )
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # tokens first, in their order
        self.inputs = _reordered(self.inputs, order)

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

    @cached_property
    def begins(self) -> Tensor:
        """The slot of each row's first new token [B]: after the longer of its two branches."""
        if self.unconditional is None:
            return self.lengths
        return torch.maximum(self.lengths, self.unconditional.lengths)

    @property
    def width(self) -> int:
        """Slots of the prefill: L, or the length of the unconditional prompt if it is longer."""
        unconditional_width = self.unconditional.width if self.unconditional is not None else 0
        return max(self.input_ids.shape[1], unconditional_width)

    @property
    def room(self) -> int:
        """The most tokens that a row may hold."""
        return max(self.width, self.longest) + self.max_new_tokens

    @cached_property
    def padded(self) -> bool:
        """Whether any row's answer begins before the prefill's last slot."""
        return bool((self.begins < self.width).any())

    @property
    def vision(self) -> dict[str, Any]:
        """Everything but the tokens: pixels, grids, sizes."""
        return {
            k: v
            for k, v in self.inputs.items()
            if k not in (*PER_TOKEN, POSITIONS) and v is not None
        }

    @property
    def types(self) -> dict[str, Tensor]:
        """The kind of each token [B, L] (text, picture, …), if the processor gives it."""
        return {k: self.inputs[k] for k in TYPES if self.inputs.get(k) is not None}

    @property
    def kind(self) -> frozenset[str]:
        """Names of the inputs other than tokens, and whether rows differ in length."""
        ragged = {"rows of several lengths"} if self.padded else set()
        return frozenset({*self.vision, *self.types, *ragged})

    def at_left(self) -> tuple[dict[str, Any], Tensor]:
        """The inputs with their padding at the left, and each row's first slot [B]."""
        first = self.input_ids.shape[1] - self.lengths
        if not self.padded:
            return self.inputs, first
        column = torch.arange(self.input_ids.shape[1], device=first.device)
        order = (column - first[:, None]) % len(column)
        return _reordered(self.inputs, order), first

    def branches(self) -> tuple[Tensor, Tensor]:
        """Ids [R, ``width``] of both branches, right-aligned, and each row's first slot [R]."""
        assert self.unconditional is not None
        both = (self, self.unconditional)
        ids = torch.cat([F.pad(p.input_ids, (0, self.width - p.input_ids.shape[1])) for p in both])
        first = self.begins.repeat(2) - torch.cat([p.lengths for p in both])
        column = torch.arange(self.width, device=ids.device)
        return ids.gather(1, (column - first[:, None]).clamp(min=0)), first

    def next_positions(self) -> Tensor:
        """Positions [B] of the token after each row, with M-RoPE and given positions."""
        positions: Tensor = self.inputs[POSITIONS]
        return positions.amax(0).masked_fill(~self.mask, -1).amax(1) + 1

    def extended(self, tokens: Tensor) -> VLMPrompt:
        """A copy with ``tokens`` [B] appended to the rows, and room for one token less."""
        inputs = dict(self.inputs)
        if inputs.get(POSITIONS) is not None:
            where = self.lengths.expand(3, -1)[..., None]
            new = self.next_positions().expand(3, -1)[..., None]
            inputs[POSITIONS] = F.pad(inputs[POSITIONS], (0, 1)).scatter(2, where, new)
        values = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        for key in PER_TOKEN:
            if inputs.get(key) is not None:
                longer = F.pad(inputs[key], (0, 1))
                new = values.get(key, torch.zeros_like(tokens)).to(longer)
                inputs[key] = longer.scatter(1, self.lengths[:, None], new[:, None])
        return VLMPrompt(inputs, max(self.max_new_tokens - 1, 1), self.source)

    def to(self, device: torch.device, dtype: torch.dtype) -> VLMPrompt:
        """A copy on ``device``, pixels in ``dtype``."""
        inputs = on_device(self.inputs, device, dtype)
        unconditional = None if self.unconditional is None else self.unconditional.to(device, dtype)
        return VLMPrompt(inputs, self.max_new_tokens, self.source, self.longest, unconditional)

    def rows(self) -> list[list[int]]:
        """The token ids of each row, without padding."""
        lengths = self.lengths.tolist()
        return [row[:n] for row, n in zip(self.input_ids.tolist(), lengths, strict=True)]


def _reordered(inputs: Mapping[str, Any], order: Tensor) -> dict[str, Any]:
    """``inputs`` with all per-token tensors in another ``order`` [B, L]."""
    moved = {k: inputs[k].gather(1, order) for k in PER_TOKEN if inputs.get(k) is not None}
    if inputs.get(POSITIONS) is not None:
        moved[POSITIONS] = inputs[POSITIONS][-3:].gather(2, order.expand(3, -1, -1))
    return {**inputs, **moved}


def on_device(
    inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """``inputs`` with every tensor on ``device`` and floating-point tensors in ``dtype``."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    return {name: moved(value) for name, value in inputs.items()}


def padded(rows: list[list[int]], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """``rows`` of ids as one batch, padded at the right."""
    width = max(map(len, rows))
    ids = [row + [0] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }
