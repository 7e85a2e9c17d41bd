"""Training of a small language model of source code: transformers' own Qwen2, deep and narrow, from nothing.

Deep and narrow, for one token then takes long for what it computes, and several take hardly longer.

Shape letters: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from specmm.diffusion_drafters.data.code import windows
from specmm.training import Losses, fit, seeded

LENGTH = 256  # tokens of a row
ROOM = 1024  # positions
MUON = 1e-2  # learning rate of the layers' matrices


@dataclass(frozen=True)
class Sizes:
    """Width, layers and attention heads of a model. Raises ``ValueError`` when the heads do not divide the width."""

    dim: int = 128
    layers: int = 20
    heads: int = 4

    def __post_init__(self) -> None:
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(f"width must be an even multiple of the heads, got {self.dim} and {self.heads}")

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers."""
        return -(-self.dim * 8 // 3 // 32) * 32


def build_model(sizes: Sizes, tokenizer: Any, seed: int) -> Any:
    """A model of ``tokenizer``'s tokens with random weights; what each branch adds is small at first (as in GPT-2)."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.dim,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=ROOM,
        initializer_range=0.04,  # the default is meant for wider models
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with seeded(seed):
        model: Any = Qwen2ForCausalLM(config)
    small = (2 * sizes.layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(small)
            layer.mlp.down_proj.weight.mul_(small)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


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
    compiled: bool = True,
    evaluate_every: int = 200,
) -> None:
    """Train ``model`` in place on ``stream`` [T]; resumes from ``out``; ``loss.csv`` has the held-out loss, too."""
    compile_layers(model.model.layers, compiled)
    found = {"held_out": torch.zeros(())}

    def step(i: int) -> Losses:
        if i % evaluate_every == 0:
            found["held_out"] = evaluate(model, held_out)
        with torch.autocast(model.device.type, torch.bfloat16):
            return {"loss": next_token_loss(model, windows(stream, i, batch, LENGTH + 1, seed)), **found}

    fit(model, step, out=out, steps=steps, lr=lr, muon=MUON)


def compile_layers(layers: Any, compiled: bool = True) -> None:
    """Compile each of ``layers``, which are alike: one of them takes seconds, a deep model as a whole many minutes."""
    for layer in layers if compiled else ():
        layer.compile()


@torch.no_grad()
def evaluate(model: Any, stream: Tensor, rows: int = 32) -> Tensor:
    """Mean loss (nats a token) over ``rows`` of ``stream`` [T], always the same."""
    with torch.autocast(model.device.type, torch.bfloat16):
        losses = [next_token_loss(model, windows(stream, i, 8, LENGTH + 1, 0)) for i in range(-(-rows // 8))]
    return torch.stack(losses).mean()
