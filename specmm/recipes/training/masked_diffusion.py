"""Training of a small diffusion language model in Dream's format, on text alone.

Half of the rows have tokens hidden anywhere, as in masked diffusion (weight one over the share),
the other half their end, as in drafting. Source of the loss: LLaDA and Dream (arXiv 2502.09992,
2508.15487).

Shape letters: B rows, L tokens, T tokens of all texts, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.checkpoints import write_checkpoint
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention
from specmm.hf.drafters.files import HEAD
from specmm.recipes.training.small_qwen import compile_layers
from specmm.recipes.training.texts import windows
from specmm.training import MUON, Losses, Run, fit, share

LENGTH = 128  # tokens of a row
BLOCK = 16  # most tokens hidden at a row's end
LEAST = 0.1  # share hidden: its inverse is a weight


def train_diffusion(
    model: FullAttention,
    stream: Tensor,
    run: Run,
    *,
    batch: int = 16,
    seed: int = 0,
    compiled: bool = True,
) -> None:
    """Train ``model`` in place on ``stream`` [T]."""
    compile_layers(model.model.model.layers, compiled)

    def step(i: int) -> Losses:
        rows = share(windows(stream, i, batch, LENGTH, seed)).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            return {"loss": denoising_loss(model, rows, seed * 1_000_003 + i)}

    fit(model.model, step, run, muon=MUON * run.lr)
    model.model.eval()


def denoising_loss(model: FullAttention, rows: Tensor, seed: int) -> Tensor:
    """Cross-entropy (nats) of the hidden tokens of ``rows`` [B, L] by the rows that score them."""
    hidden, weights = (x.to(rows.device) for x in hide(len(rows), rows.shape[1], seed))
    states = model.states(rows.masked_fill(hidden, model.mask))
    wanted = rows[:, model.shift :]
    weights = weights[:, model.shift :]
    scored = weights > 0
    logits = model.head(states[:, : rows.shape[1] - model.shift][scored]).float()
    losses = F.cross_entropy(logits, wanted[scored], reduction="none")
    return (losses * weights[scored]).sum() / weights.sum()


def hide(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Which tokens [B, L] are hidden and the weight of each; the first never is."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, 1, generator=generator).clamp(min=LEAST)
    anywhere = torch.rand(rows, length, generator=generator) < share
    ends = torch.randint(1, min(BLOCK, length - 1) + 1, (rows, 1), generator=generator)
    order = torch.arange(length)
    drafting = torch.arange(rows)[:, None] % 2 == 0
    hidden = torch.where(drafting, order >= length - ends, anywhere) & (order > 0)
    return hidden, hidden / torch.where(drafting, ends / length, share)


def save_dream(model: FullAttention, folder: str | Path) -> None:
    """Write Dream's format (bf16): its names and config, without the head where it is tied."""
    state: dict[str, Any] = model.model.state_dict()
    if model.model.config.tie_word_embeddings:
        state.pop(HEAD)
    facts = json.loads(model.model.config.to_json_string(use_diff=False))
    facts |= {"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": model.mask}
    write_checkpoint(state, facts | {"eos_token_id": model.end}, folder, torch.bfloat16)
