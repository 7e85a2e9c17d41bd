"""A small Qwen2 of transformers with random weights: a target, or the body of a diffusion model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from specmm.core.randomness import seeded

LENGTH = 256  # tokens of a row
ROOM = 1024  # positions


@dataclass(frozen=True)
class Sizes:
    """Width, layers and attention heads; ``ValueError`` when the heads do not divide the width."""

    dim: int = 128
    layers: int = 20
    heads: int = 4

    def __post_init__(self) -> None:
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(
                f"width must be an even multiple of the heads, got {self.dim} and {self.heads}"
            )

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers."""
        return -(-self.dim * 8 // 3 // 32) * 32


def build_model(sizes: Sizes, tokenizer: Any, seed: int) -> Any:
    """A model of ``tokenizer``'s tokens with random weights, its branches scaled as in GPT-2."""
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
    model.generation_config.update(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def compile_layers(layers: Any) -> None:
    """Compile each of ``layers``: they are alike, and a whole deep model would take minutes."""
    for layer in layers:
        layer.compile()
