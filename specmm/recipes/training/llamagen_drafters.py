"""Training of LlamaGen's block drafter and EAGLE head against their target, on the fly: no feature
files.

Shape letters: M pictures, B batch, T tokens of a picture, A anchors a picture, C width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import Transformer
from specmm.recipes.training.block_drafter import (
    Batch,
    Seen,
    block_loss,
    fit_block,
    go_on_from,
    start_from,
)
from specmm.recipes.training.eagle_drafter import eagle_loss, fit_eagle
from specmm.recipes.training.encoding import CLASS_DROPOUT
from specmm.training import Losses, seeded


def train_block(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    config: BlockConfig,
    out: Path,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    start: BlockHead | None = None,
    **options: Any,
) -> BlockHead:
    """Train on ``tokens`` [M, 2, T] with ``labels`` [M]; resumes from ``out/checkpoint.pt``.

    ``temperature`` is the one that pictures will be sampled at: the distributions compared are
    softened or sharpened by it. ``start`` is a drafter to go on from, see
    :func:`specmm.recipes.training.block_drafter.go_on_from`; ``options`` are those of
    :func:`specmm.recipes.training.block_drafter.fit_block`.
    """
    with seeded(seed):
        drafter = BlockHead(config)
    target = target.eval().requires_grad_(False)
    start_from(drafter, target.norm.weight)
    if start is not None:
        go_on_from(drafter, start)
    rotary = drafter.rotary

    @torch.compile
    def loss_of(classes: Tensor, pictures: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        seen = seen_by(target, classes, pictures, config.aux_layers)
        return block_loss(drafter, seen, lambda x, _: target.output(x), at, rotary, temperature)

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        classes = labels[batch.rows].masked_fill(batch.dropped, target.config.num_classes)
        return loss_of(classes, tokens[batch.rows, batch.mirrored], batch.at)

    size = (len(tokens), target.config.block_size)
    fit_block(drafter, size, loss, out, seed=seed, **options)
    return drafter


@torch.no_grad()
def seen_by(target: Transformer, labels: Tensor, tokens: Tensor, aux_layers: Sequence[int]) -> Seen:
    """What a LlamaGen reads of ``tokens`` [B, T] of ``labels`` [B]."""
    # position i predicts token i
    logits, hidden = target(target.embed(labels, tokens[:, :-1]), aux_layers=aux_layers)
    return Seen(logits, hidden, target.tok_embeddings(tokens), tokens)


def train_eagle(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    out: Path,
    *,
    ffn_dim: int | None = None,
    seed: int = 0,
    compiled: bool = True,
    **options: Any,
) -> EagleHead:
    """Train on ``tokens`` [M, 2, T] (both mirrorings) with ``labels`` [M]; resumes from
    ``out/checkpoint.pt``.

    The head reads the target's hidden states with a little noise and learns the next one and the
    distribution that the target's output head makes of it, as EAGLE (arXiv 2401.15077) and LANTERN
    (2410.03355) train it. Token embeddings are the target's and stay so. ``options`` are those of
    :func:`specmm.recipes.training.eagle_drafter.fit_eagle`. Raises ``ValueError`` for a target that
    is not class-conditional.
    """
    if target.config.model_type != "c2i":
        raise ValueError(f"target must be class-conditional (c2i), got {target.config.model_type}")
    with seeded(seed):
        head = EagleHead(EagleConfig(target.config, ffn_dim))
    target = target.eval().requires_grad_(False)
    assert head.embed_tokens is not None, "a LlamaGen's head has its own"
    head.embed_tokens.load_state_dict(target.tok_embeddings.state_dict())
    head.embed_tokens.requires_grad_(False)

    def loss_of(classes: Tensor, pictures: Tensor, shift: Tensor) -> Losses:
        seen = seen_by(target, classes, pictures, ())
        return eagle_loss(head, seen, lambda x, _: target.output(x), shift)

    made = torch.compile(loss_of) if compiled else loss_of

    def loss(rows: Tensor, mirrored: Tensor, dropped: Tensor, shift: Tensor) -> Losses:
        classes = labels[rows].masked_fill(dropped, target.config.num_classes)
        return made(classes, tokens[rows, mirrored], shift)

    size = (len(tokens), target.config.block_size)
    fit_eagle(head, size, loss, out, dropout=CLASS_DROPOUT, seed=seed, **options)
    return head
