"""Captions for text-conditional models: T5 features and their padding.

Source: LlamaGen (arXiv 2406.06525). Shape letters: B captions, P prefix positions (120 in the
published models), C T5 width.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specmm import zoo
from specmm.image_ar.tokens.target import Prompt

FLAN_T5_XL = "google/flan-t5-xl"  # the encoder of the published models


class CaptionEncoder:
    """A T5 encoder and its tokenizer, from a local folder, a published name or a hub id."""

    def __init__(
        self,
        folder: str | Path = FLAN_T5_XL,
        *,
        tokens: int = 120,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        from transformers import T5EncoderModel

        from specmm.hf.loading.pretrained import load_model, load_tokenizer

        try:
            files = zoo.find(folder, zoo.TRANSFORMERS)
            self.tokenizer = load_tokenizer(files)
            model = load_model(T5EncoderModel, files, dtype=dtype)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"text encoder must be a T5 folder or hub name, got {folder}: {reason}"
            ) from error
        self.model = model.train(False).to(torch.device(device))
        self.tokens = tokens

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> Prompt:
        """Features of ``prompts``, cut at P tokens and left-padded.

        Raises ``ValueError`` when there are none or one is empty.
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
        return Prompt(*left_pad(hidden.last_hidden_state, mask))


def clean(prompt: str) -> str:
    """``prompt`` in lower case, HTML entities resolved, runs of space collapsed.

    The release also removes addresses, file names and shop phrases from captions scraped from the
    web; this is left out, because it would drop words that a person typed.
    """
    return " ".join(html.unescape(prompt).lower().split())


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move right padding (zeroed) of ``features`` [B, P, C] and ``mask`` [B, P] to the left."""
    places = torch.arange(mask.shape[1], device=mask.device)
    source = (places + mask.sum(1, keepdim=True)) % mask.shape[1]  # [B, P]
    flipped = mask.bool().flip(1)
    moved = features.gather(1, source[..., None].expand_as(features))
    return moved * flipped[..., None], flipped
