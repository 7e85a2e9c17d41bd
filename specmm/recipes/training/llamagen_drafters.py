"""Training of LlamaGen's block drafter and EAGLE head against their target, on the fly: no feature
files; and the acceptance that ``auto`` plans trees from.

Shape letters: M pictures, B batch, T tokens of a picture, A anchors a picture, K levels, C width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.acceptance_stats import WIDEST, AcceptanceCounter
from specmm.decode import decode
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.drafters.eagle import EagleConfig, EagleHead
from specmm.image_ar.tokens.gpt import Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.randomness import Uniforms
from specmm.recipes.training.encoding import CLASS_DROPOUT
from specmm.shape.trees import spine
from specmm.training import Losses, batch_rows, fit, seeded
from specmm.verify import Recursive

PROBS_WEIGHT = 0.1  # of EAGLE's cross-entropy beside its SmoothL1


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
    is the one that pictures will be sampled at: the distributions compared are softened or
    sharpened by it. ``dropout`` is the share of pictures shown without their class, which a drafter
    needs where guidance makes it draft for both branches. ``start`` is a drafter to go on from, see
    :func:`go_on_from`.
    """
    with seeded(seed):
        drafter = BlockHead(config)
    target = target.eval().requires_grad_(False)
    start_from(drafter, target)
    if start is not None:
        go_on_from(drafter, start)

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


@torch.no_grad()
def start_from(drafter: BlockHead, target: Transformer) -> None:
    """Make ``drafter`` begin where a feature is the target's hidden state and the final norm is the
    target's.
    """
    width = target.config.dim
    drafter.fc.weight[:, width : 2 * width] = torch.eye(width)
    drafter.norm.weight.copy_(target.norm.weight)


@torch.no_grad()
def go_on_from(drafter: BlockHead, other: BlockHead) -> None:
    """Make ``drafter`` begin as ``other``; units that its feed-forward layers lack add nothing yet.

    Raises ``ValueError`` where these are wider than the drafter's, or where the two differ in
    levels, layers or auxiliary layers.
    """
    config, begun = drafter.config, other.config
    wide, given = (c.inner or c.target.ffn_dim for c in (config, begun))
    if given > wide or replace(begun, inner=config.inner) != config:
        raise ValueError(
            "drafter must go on from one of its levels, layers and auxiliary layers, at most "
            f"{wide} wide, got one with {begun.levels} levels, {begun.layers} layers, "
            f"auxiliary layers {begun.aux_layers}, {given} wide"
        )
    own = drafter.state_dict()
    for name, old in other.state_dict().items():
        if name.endswith("feed_forward.w2.weight"):
            own[name].zero_()
        own[name][tuple(slice(size) for size in old.shape)] = old


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

    They compare the drafter's distribution of a level, given the true token before it, with the
    target's there. The overlap is 1 less the total variation, which is what acceptance loses.

    At anchor a, whose root is token a, the features of positions up to a are seen and tokens a + 1
    … a + K drafted.
    """
    levels, count = drafter.config.levels, tokens.shape[1]
    with torch.no_grad():
        # position i predicts token i
        logits, hidden = target(
            target.embed(labels, tokens[:, :-1]), aux_layers=drafter.config.aux_layers
        )
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
    bias = F.pad(bias, (0, wanted[0].numel()), value=float("-inf"))[:, None].to(hidden.dtype)
    states = drafter(x, cells, bias)[:, count:]
    previous = tokens.gather(1, wanted.flatten(1) - 1)
    drafted = target.output(drafter.read(states, previous)).float() / temperature
    drafted = drafted.log_softmax(-1)  # [B, A·K, V]
    probs = (logits.float() / temperature).softmax(-1)
    probs = probs.gather(1, wanted.flatten(1)[..., None].expand_as(drafted))
    overlap = torch.minimum(probs, drafted.exp()).sum(-1).unflatten(1, (-1, levels))
    cross_entropy = -(probs * drafted).sum(-1).mean()
    return cross_entropy, overlap.mean((0, 1))


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


def measure_acceptance(
    head: BlockHead, target: LlamaGenTarget, prompt: Prompt, seeds: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """How often the block drafter's child of a level and rank is the one kept, over one batch of
    pictures, one seed each, under exact decoding.
    """
    shape = spine(WIDEST[: head.config.levels])
    counter = AcceptanceCounter(BlockDrafter(head, target, shape), shape)
    uniforms = Uniforms.from_seeds(seeds)
    for _ in decode(target, counter, Recursive(), prompt, target.length, uniforms):
        pass
    return counter.table()
