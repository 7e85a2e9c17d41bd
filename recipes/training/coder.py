"""Training of a small language model of source code: transformers' own Qwen2, deep and narrow, from
nothing.

Deep and narrow, for one token then takes long for what it computes, and several take hardly longer.

Shape letters: B rows, L tokens, T tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from recipes.scenes.tokenizer import byte_pairs
from specmm.recipes.loop import Losses, Run, fit
from specmm.recipes.training.small_qwen import LENGTH, compile_layers
from specmm.recipes.training.texts import windows

END = "<|end|>"
PAD = "<|pad|>"
MASK = "<|mask|>"
VOCABULARY = 4096
MUON = 1e-2  # learning rate of the layers' matrices


def build_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Learn at most ``vocabulary`` byte-level tokens from ``texts``; line breaks and the spaces
    after them are one.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(texts, vocabulary, (END, PAD, MASK)),
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def next_token_loss(model: Any, rows: Tensor) -> Tensor:
    """Mean cross-entropy (nats a token) of ``rows`` [B, L + 1]."""
    states = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(states).flatten(0, 1).float(), rows[:, 1:].flatten())


def train_target(
    model: Any,
    stream: Tensor,
    held_out: Tensor,
    out: Path,
    *,
    steps: int,
    batch: int = 8,
    lr: float = 6e-3,
    seed: int = 0,
    evaluate_every: int = 200,
) -> None:
    """Train ``model`` in place on ``stream`` [T]; resumes from ``out``; ``loss.csv`` has the
    held-out loss, too.
    """
    compile_layers(model.model.layers)
    found = {"held_out": torch.zeros(())}

    def step(i: int) -> Losses:
        if i % evaluate_every == 0:
            found["held_out"] = evaluate(model, held_out)
        with torch.autocast(model.device.type, torch.bfloat16):
            return {
                "loss": next_token_loss(model, windows(stream, i, batch, LENGTH + 1, seed)),
                **found,
            }

    fit(model, step, Run(out, steps, lr), muon=MUON)


@torch.no_grad()
def evaluate(model: Any, stream: Tensor, rows: int = 32) -> Tensor:
    """Mean loss (nats a token) over ``rows`` of ``stream`` [T], always the same."""
    with torch.autocast(model.device.type, torch.bfloat16):
        losses = [
            next_token_loss(model, windows(stream, i, 8, LENGTH + 1, 0))
            for i in range(-(-rows // 8))
        ]
    return torch.stack(losses).mean()
