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
import torch.nn.functional as F
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
from specmm.recipes.training.encoding import CLASS_DROPOUT
from specmm.training import Losses, batch_rows, fit, seeded

PROBS_WEIGHT = 0.1  # of EAGLE's cross-entropy beside its SmoothL1


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
    return Seen(logits, hidden, target.tok_embeddings(tokens), tokens, target.config.columns)


def train_eagle(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    out: Path,
    *,
    steps: int,
    ffn_dim: int | None = None,
    batch: int = 16,
    lr: float = 1e-4,
    noise: float = 0.2,
    weight_decay: float = 0.01,
    seed: int = 0,
    compiled: bool = True,
) -> EagleHead:
    """Train on ``tokens`` [M, 2, T] (both mirrorings) with ``labels`` [M]; resumes from
    ``out/checkpoint.pt``.

    The head reads the target's hidden states with a little noise and learns the next one and the
    distribution that the target's output head makes of it, as EAGLE (arXiv 2401.15077) and LANTERN
    (2410.03355) train it. Token embeddings are the target's and stay so. The noise is uniform in
    ±``noise`` · 256 / T. Raises ``ValueError`` for a target that is not class-conditional.
    """
    if target.config.model_type != "c2i":
        raise ValueError(f"target must be class-conditional (c2i), got {target.config.model_type}")
    with seeded(seed):
        head = EagleHead(EagleConfig(target.config, ffn_dim))
    target = target.eval().requires_grad_(False)
    head.embed_tokens.load_state_dict(target.tok_embeddings.state_dict())
    head.embed_tokens.requires_grad_(False)
    loss_of = torch.compile(eagle_loss) if compiled else eagle_loss

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(tokens), seed)
        mirrored = torch.randint(2, (batch,), generator=generator)
        dropped = torch.rand(batch, generator=generator) < CLASS_DROPOUT
        classes = labels[rows].masked_fill(dropped, target.config.num_classes)
        shape = (batch, tokens.shape[-1] - 1, target.config.dim)
        shift = (torch.rand(shape, generator=generator) - 0.5) * noise * 512 / tokens.shape[-1]
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(target, head, classes, tokens[rows, mirrored], shift)

    fit(head, step, out=out, steps=steps, lr=lr, weight_decay=weight_decay)
    return head


def eagle_loss(
    target: Transformer, head: EagleHead, labels: Tensor, tokens: Tensor, shift: Tensor
) -> Losses:
    """Loss and its parts (SmoothL1 of the states, soft cross-entropy) for ``tokens`` [B, T], with
    ``shift`` [B, T - 1, C] added to the hidden states read.

    ``overlap`` is the mean of Σ min(p, q): how likely a single draft is accepted.
    """
    with torch.no_grad():
        logits, hidden = target(target.embed(labels, tokens[:, :-1]))  # position i predicts token i
        probs = logits[:, 1:].float().softmax(-1)  # [B, T - 1, V]
    predicted = head(tokens[:, :-1], hidden[:, :-1] + shift)
    drafted = target.output(predicted).float().log_softmax(-1)
    regression = F.smooth_l1_loss(predicted.float(), hidden[:, 1:].float())
    cross_entropy = -(probs * drafted).sum(-1).mean()
    overlap = torch.minimum(probs, drafted.detach().exp()).sum(-1).mean()
    return {
        "loss": regression + PROBS_WEIGHT * cross_entropy,
        "smooth_l1": regression,
        "cross_entropy": cross_entropy,
        "overlap": overlap,
    }
