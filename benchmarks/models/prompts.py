"""Prompts for tiny models: text that repeats itself, pictures between, ragged batches."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.models.tiny import BOS, PAD

Inputs = dict[str, Any]
WORDS = [11, 12, 13, 14, 15, 11, 12, 13, 16, 17, 11, 12, 13]
ROWS = ([BOS, *WORDS], [BOS, 21, 22, 23, 21, 22, 23, 21], [BOS, *WORDS[3:], 18, *WORDS[3:]])


def text_prompts() -> dict[str, Inputs]:
    """One row, and a batch of three of different lengths."""
    return {"text": left_padded(ROWS[:1]), "batch": left_padded(ROWS)}


def left_padded(rows: Any) -> Inputs:
    """``rows`` of ids as generate wants them."""
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
