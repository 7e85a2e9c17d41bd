"""Training of the block drafter against its target, on the fly: no feature files.

At random anchors of each picture the drafter's distribution of level d, given the true token before
it, is pulled towards the target's distribution there by the forward cross-entropy, plus the total
variation, which is what acceptance loses. Shape letters: B batch, T tokens of a picture, A anchors
a picture, K levels, C width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockHead
from specmm.image_ar.tokens.gpt import Transformer
from specmm.training import Losses, batch_rows, fit, seeded


def train_block(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    config: BlockConfig,
    out: Path,
    *,
    steps: int,
    batch: int = 16,
    anchors: int = 32,
    lr: float = 1e-3,
    overlap_weight: float = 1.0,
    temperature: float = 1.0,
    dropout: float = 0.0,
    seed: int = 0,
    start: BlockHead | None = None,
) -> BlockHead:
    """Train on ``tokens`` [M, 2, T] with ``labels`` [M]; resumes from ``out/checkpoint.pt``.

    A larger ``overlap_weight`` late in training buys acceptance with calibration. ``temperature``
    is the one that will be sampled at: the distributions compared are softened or sharpened by it.
    ``dropout`` is the share of pictures shown without their class, which a drafter needs where
    guidance has it draft for both branches. ``start`` is a drafter to go on from, with as many
    layers, levels and auxiliary layers, and feed-forward layers no wider.
    """
    with seeded(seed):
        drafter, target = BlockHead(config), target.eval().requires_grad_(False)
    drafter.start_from(target)
    if start is not None:
        drafter.go_on_from(start)

    @torch.compile
    def loss_of(classes: Tensor, pictures: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return block_loss(target, drafter, classes, pictures, at, temperature)

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(tokens), seed)
        mirrored = torch.randint(2, (batch,), generator=generator)
        dropped = torch.rand(batch, generator=generator) < dropout
        classes = labels[rows].masked_fill(dropped, target.config.num_classes)
        last = target.config.block_size - config.levels
        at = torch.rand(batch, last, generator=generator).argsort(1)[:, :anchors]
        with torch.autocast("cpu", torch.bfloat16):
            cross_entropy, overlap = loss_of(classes, tokens[rows, mirrored], at)
        loss = cross_entropy + overlap_weight * (1 - overlap.mean())
        return {"loss": loss, **{f"overlap_{d + 1}": o for d, o in enumerate(overlap.detach())}}

    fit(drafter, step, out=out, steps=steps, lr=lr, weight_decay=0.01)
    return drafter


def block_loss(
    target: Transformer,
    drafter: BlockHead,
    labels: Tensor,
    tokens: Tensor,
    at: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy and mean overlap Σ min(p, q) by level [K] for anchors ``at`` [B, A] of
    ``tokens`` [B, T].

    Anchor a stands for the root token a: the features of positions up to a are seen, tokens a + 1 …
    a + K drafted.
    """
    levels, count = drafter.config.levels, tokens.shape[1]
    with torch.no_grad():
        logits, hidden = target(
            target.embed(labels, tokens[:, :-1]), aux_layers=drafter.config.aux_layers
        )  # position i predicts token i
        embedded = target.tok_embeddings(tokens)
    features = drafter.features(embedded, hidden)  # e_i holds hidden i and token i
    order = torch.arange(count)[None]
    wanted = at[..., None] + 1 + torch.arange(levels)  # [B, A, K] tokens drafted
    anchor = features.gather(1, at[..., None].expand(-1, -1, features.shape[-1]))
    x = torch.cat([features, drafter.queries(anchor, levels)], dim=1)  # [B, T + A·K, C]
    cells = torch.cat([order.expand(len(at), -1), wanted.flatten(1)], dim=1)
    latest = torch.cat([order.expand(len(at), -1), at.repeat_interleave(levels, dim=1)], dim=1)
    seen = order[:, None] <= latest[..., None]  # [B, T + A·K, T]: nothing attends a query
    bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    bias = torch.nn.functional.pad(bias, (0, wanted[0].numel()), value=float("-inf"))[:, None].to(
        hidden.dtype
    )
    states = drafter(x, cells, bias)[:, count:]
    previous = tokens.gather(1, wanted.flatten(1) - 1)
    drafted = (target.output(drafter.read(states, previous)).float() / temperature).log_softmax(
        -1
    )  # [B, A·K, V]
    p = (
        (logits.float() / temperature)
        .softmax(-1)
        .gather(1, wanted.flatten(1)[..., None].expand_as(drafted))
    )
    overlap = torch.minimum(p, drafted.exp()).sum(-1).unflatten(1, (-1, levels))
    cross_entropy = -(p * drafted).sum(-1).mean()
    return cross_entropy, overlap.mean((0, 1))
