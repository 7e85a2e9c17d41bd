"""Captions for text-conditional models: T5 features, their padding, and the attention masks they
ask for.

Source: LlamaGen (arXiv 2406.06525). Shape letters: B captions, R rows (B, doubled under guidance),
P prefix positions (120 in the published models), C T5 width, T query positions, S attended
positions (P prefix ones first).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

FLAN_T5_XL = "google/flan-t5-xl"  # the encoder of the published models


@dataclass
class CaptionBatch:
    """``features`` [B, P, C] left-padded with zeros and ``mask`` [B, P], true on the caption's own
    positions.
    """

    features: Tensor
    mask: Tensor


class CaptionEncoder:
    """A T5 encoder and its tokenizer, from a local folder or a hub name."""

    def __init__(
        self,
        folder: str | Path = FLAN_T5_XL,
        *,
        tokens: int = 120,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        from transformers import T5EncoderModel

        from specmm.hf.pretrained import load_model, load_tokenizer

        try:
            self.tokenizer = load_tokenizer(folder)
            model = load_model(T5EncoderModel, folder, dtype=dtype)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"text encoder must be a T5 folder or hub name, got {folder}: {reason}"
            ) from error
        self.model = model.train(False).to(torch.device(device))
        self.tokens = tokens

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> CaptionBatch:
        """Features of ``prompts``, cut at P tokens. Raises ``ValueError`` when there are none or
        one is empty.
        """
        if not prompts or not all(prompt.strip() for prompt in prompts):
            raise ValueError(f"prompts must be non-empty texts, got {list(prompts)}")
        words = self.tokenizer(
            [clean(prompt) for prompt in prompts],
            max_length=self.tokens,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        mask = words["attention_mask"].to(self.model.device)
        hidden = self.model(input_ids=words["input_ids"].to(self.model.device), attention_mask=mask)
        return CaptionBatch(*left_pad(hidden.last_hidden_state, mask))


def encode_captions(
    prompts: Sequence[str], folder: str | Path = FLAN_T5_XL, *, tokens: int = 120
) -> CaptionBatch:
    """Features of ``prompts`` by the T5 encoder in ``folder``; keep a ``CaptionEncoder`` to encode
    more than once.
    """
    return CaptionEncoder(folder, tokens=tokens)(prompts)


def clean(prompt: str) -> str:
    """``prompt`` in lower case, HTML entities resolved, runs of space collapsed.

    The release's further clean-up, meant for captions scraped from the web (addresses, file names,
    shop phrases), is left out: it drops words that a person typed.
    """
    return " ".join(html.unescape(prompt).lower().split())


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move right padding to the left: ``features`` [B, P, C] (padding zeroed) and ``mask`` [B, P]
    bool.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    source = (places + mask.sum(1, keepdim=True)) % mask.shape[1]  # [B, P]
    flipped = mask.bool().flip(1)
    moved = features.gather(1, source[..., None].expand_as(features))
    return moved * flipped[..., None], flipped


def prefix_mask(mask: Tensor, length: int, first: int = 0) -> Tensor:
    """What positions ``first`` … ``length`` - 1 attend to, [R, T, S] bool with S = ``length``.

    Earlier positions and themselves, of the prefix only where ``mask`` [R, P] is true; a masked
    position still attends to itself. Training uses ``length`` = P + tokens - 1; under guidance both
    halves take the caption's mask.
    """
    rows, prefix = mask.shape
    places = torch.arange(length, device=mask.device)
    own = places[first:, None] == places  # [T, S]
    shown = torch.ones(rows, length, dtype=torch.bool, device=mask.device)
    shown[:, :prefix] = mask[:, :length].bool()
    return own | (shown[:, None] & (places[first:, None] > places))


def additive(allowed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Attention bias [R, 1, T, S] of ``allowed`` [R, T, S]: 0 where true, -inf where not."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, float("-inf")
    )[:, None]
