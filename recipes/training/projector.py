"""Training of the projector alone, between a tower and a language model that stay as they are.

It first learns the words for each patch (:mod:`recipes.training.align`), then what makes the frozen
language model answer as it should: gradients go through it, not into it. Source: LLaVA's first
stage (arXiv 2304.08485).

Shape letters: M tokens of answers, C width.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlavaForConditionalGeneration

from recipes.scenes.packing import Batch, Encoder, stack
from recipes.scenes.stream import World
from recipes.training.llava import answer_states
from specmm.recipes.loop import Losses, Run, fit

LENGTH = 224  # tokens of a row


def tower_features(tower: Any, pixels: Tensor) -> Tensor:
    """What the projector reads [B, N, D] of a tower without a class token."""
    found: Tensor = tower(pixels).last_hidden_state
    return found


def train_between(
    model: LlavaForConditionalGeneration,
    encoder: Encoder,
    world: World,
    held_out: World | None,
    out: Path,
    *,
    steps: int,
    batch: int = 8,
    lr: float = 1e-3,
    seed: int = 0,
    evaluate_every: int = 100,
) -> None:
    """Train the projector of ``model``, in place; the language model is left in bf16. Resumes from
    ``out``.

    ``loss.csv`` has the share of answers' tokens that are the likeliest, in training and (every
    ``evaluate_every`` steps) about ``held_out``.
    """
    projector: Any = model.model.multi_modal_projector
    model.requires_grad_(False).to(torch.bfloat16)  # type: ignore[arg-type]
    projector.to(torch.float32).requires_grad_(True)
    seen = {"held out": torch.zeros(())} if held_out is not None else {}
    run = torch.compile(answer_states)

    def losses(source: World, random: Random) -> Losses:
        rows = stack([source.row(encoder, random, LENGTH) for _ in range(batch)])
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            return token_losses(model, rows, run(model, rows, tower_features, len(encoder.opening)))

    def step(i: int) -> Losses:
        if held_out is not None and i % evaluate_every == 0:
            with torch.no_grad():
                seen["held out"] = losses(held_out, Random(seed))["right"]
        return losses(world, Random(f"between {seed} {i}")) | seen

    fit(projector, step, Run(out, steps, lr), weight_decay=0.0)


def token_losses(model: LlavaForConditionalGeneration, rows: Batch, states: Tensor) -> Losses:
    """Mean cross-entropy (nats) of the M tokens of answers, and the share of them that are the
    likeliest.

    ``states`` are those of :func:`recipes.training.llava.answer_states`.
    """
    labels = rows.labels[:, -states.shape[1] :]
    asked = labels >= 0
    logits: Tensor = model.lm_head(states[asked]).float()  # of these alone: the vocabulary is large
    return {
        "loss": F.cross_entropy(logits, labels[asked]),
        "right": (logits.detach().argmax(-1) == labels[asked]).float().mean(),
    }
