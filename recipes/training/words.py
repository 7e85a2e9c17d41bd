"""Training of a text-only drafter: a small language model of the target's own tokens that never
sees a picture.

Source of the idea: arXiv 2404.08856.

Shape letters: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.scenes.packing import Encoder, stack
from recipes.scenes.stream import World
from recipes.training.llava import TEXT_LENGTH, answer_loss
from specmm.core.randomness import seeded
from specmm.recipes.loop import Losses, Run, fit


def build_text_model(
    dim: int, layers: int, heads: int, vocabulary: int, ids: Encoder, seed: int
) -> LlamaForCausalLM:
    """A language model with random weights for the target's ``vocabulary``."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=4 * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        bos_token_id=ids.bos,
        eos_token_id=ids.eos,
        pad_token_id=ids.pad,
    )
    with seeded(seed):
        return LlamaForCausalLM(config)


def train_text(
    model: LlamaForCausalLM,
    encoder: Encoder,
    world: World,
    out: Path,
    *,
    steps: int,
    batch: int = 32,
    lr: float = 2e-3,
    seed: int = 0,
) -> None:
    """Train ``model`` in place on what is asked and answered about pictures, without them; resumes
    from ``out``.
    """
    logits_of = torch.compile(lambda **inputs: model(**inputs, use_cache=False).logits)

    def step(i: int) -> Losses:
        random = Random(f"text {seed} {i}")
        rows = stack(
            [
                encoder.side_by_side(world.example(random)[1], None, TEXT_LENGTH)
                for _ in range(batch)
            ]
        )
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(
                input_ids=rows.input_ids,
                attention_mask=rows.attention_mask,
                position_ids=rows.position_ids,
            )
        return {"loss": answer_loss(logits, rows)}

    fit(model, step, Run(out, steps, lr))
