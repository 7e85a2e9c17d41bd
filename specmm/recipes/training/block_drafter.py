"""Training of LlamaGen's block drafter against its target, on the fly: no feature files; and the
acceptance that ``auto`` plans trees from.

Shape letters: M pictures, B batch, T tokens of a picture, A anchors a picture, K levels, C width, F
layers read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.autotune import WIDEST, AcceptanceCounter
from specmm.decode import decode
from specmm.drawing import DrawingTarget
from specmm.image_ar.tokens.assemble import PictureParts, assemble
from specmm.image_ar.tokens.choosing import JACOBI
from specmm.image_ar.tokens.drafters.block import BlockConfig, BlockDrafter, BlockHead
from specmm.image_ar.tokens.gpt import Transformer
from specmm.image_ar.tokens.target import LlamaGenTarget
from specmm.randomness import Uniforms
from specmm.shape.trees import spine
from specmm.training import Losses, Run, batch_rows, fit, seeded, share
from specmm.verify import Recursive


@dataclass(frozen=True)
class Seen:
    """What the target reads of pictures: their ``tokens`` [B, T], the ``logits`` [B, T, V] of each,
    the ``hidden`` states [B, T, C · (1 + F)] that these were scored from, and the tokens'
    ``embedded`` inputs [B, T, C].
    """

    tokens: Tensor
    logits: Tensor
    hidden: Tensor
    embedded: Tensor


@torch.no_grad()
def seen_by(target: Transformer, labels: Tensor, tokens: Tensor, aux_layers: Sequence[int]) -> Seen:
    """What a LlamaGen reads of ``tokens`` [B, T] of ``labels`` [B]."""
    # position i predicts token i
    logits, hidden = target(target.embed(labels, tokens[:, :-1]), aux_layers=aux_layers)
    return Seen(tokens, logits, hidden, target.tok_embeddings(tokens))


def train_block(
    target: Transformer,
    tokens: Tensor,
    labels: Tensor,
    config: BlockConfig,
    run: Run,
    *,
    batch: int = 16,
    anchors: int = 32,
    overlap_weight: float = 1.0,
    dropout: float = 0.0,
    temperature: float = 1.0,
    seed: int = 0,
    start: BlockHead | None = None,
) -> BlockHead:
    """Train on ``tokens`` [M, 2, T] with ``labels`` [M].

    ``temperature`` is the one that pictures will be sampled at: the distributions compared are
    softened or sharpened by it. A larger ``overlap_weight`` late in training buys acceptance with
    calibration. ``dropout`` is the share of pictures shown without their class, which a drafter
    needs where guidance makes it draft for both branches. ``start`` is a drafter to go on from, see
    :func:`go_on_from`.
    """
    with seeded(seed):
        drafter = BlockHead(config)
    target = target.eval().requires_grad_(False)
    start_from(drafter, target.norm.weight)
    if start is not None:
        go_on_from(drafter, start)

    @torch.compile
    def loss_of(classes: Tensor, pictures: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        seen = seen_by(target, classes, pictures, config.aux_layers)
        return block_loss(drafter, seen, target.output, at, temperature)

    def step(i: int) -> Losses:
        generator = torch.Generator().manual_seed(seed + i)
        rows = batch_rows(i, batch, len(tokens), seed)
        mirrored, dropped = varied(batch, dropout, generator)
        last = target.config.block_size - config.levels
        at = torch.rand(batch, last, generator=generator).argsort(1)[:, :anchors]
        rows, mirrored, dropped, at = map(share, (rows, mirrored, dropped, at))
        classes = labels[rows].masked_fill(dropped, target.config.num_classes)
        with torch.autocast("cpu", torch.bfloat16):
            cross_entropy, overlap = loss_of(classes, tokens[rows, mirrored], at)
        loss = cross_entropy + overlap_weight * (1 - overlap.mean())
        return {"loss": loss, **{f"overlap_{d + 1}": o for d, o in enumerate(overlap.detach())}}

    fit(drafter, step, run, weight_decay=0.01)
    return drafter


def varied(batch: int, dropout: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which pictures of a ``batch`` are mirrored [B] (0 or 1), and whose condition is dropped [B],
    a share ``dropout`` of them.
    """
    mirrored = torch.randint(2, (batch,), generator=generator)
    return mirrored, torch.rand(batch, generator=generator) < dropout


@torch.no_grad()
def start_from(drafter: BlockHead, norm: Tensor) -> None:
    """Make ``drafter`` begin where a feature is the target's hidden state and the final norm has
    the target's weights ``norm`` [C].
    """
    width = drafter.config.target.dim
    drafter.fc.weight[:, width : 2 * width] = torch.eye(width)
    drafter.norm.weight.copy_(norm)


@torch.no_grad()
def go_on_from(drafter: BlockHead, other: BlockHead) -> None:
    """Make ``drafter`` begin as ``other``.

    What this lacks of its feed-forward layers' units adds nothing yet. Further levels ask as its
    last one, which knows its place by the cell alone. Of wider layers the units with the largest
    weights are taken. Raises ``ValueError`` where the two differ in layers or auxiliary layers, and
    for levels that the drafter lacks.
    """
    config = drafter.config
    begun = other.config
    wanted = replace(begun, levels=max(begun.levels, config.levels), inner=config.inner)
    if wanted != config:
        raise ValueError(
            "drafter must go on from one of its layers and auxiliary layers, with no more than its "
            f"levels, got one with {begun.levels} levels, {begun.layers} layers, auxiliary layers "
            f"{begun.aux_layers}"
        )
    own = drafter.state_dict()
    for name, old in _narrowed(other, config.inner or config.target.ffn_dim).items():
        if name.endswith("feed_forward.w2.weight"):
            own[name].zero_()
        own[name][tuple(slice(size) for size in old.shape)] = old
    own["slots"][begun.levels :] = other.slots[-1]


def _narrowed(head: BlockHead, inner: int) -> dict[str, Tensor]:
    """Weights of ``head`` with at most ``inner`` units in each feed-forward layer, those with the
    largest weights.
    """
    found = head.state_dict()
    for i in range(len(head.layers)):
        parts = {f"layers.{i}.feed_forward.w{n}.weight": int(n == 2) for n in (1, 2, 3)}
        norms = [found[name].norm(dim=1 - dim) for name, dim in parts.items()]
        units = torch.stack(norms).prod(0)
        kept = units.topk(min(inner, len(units))).indices.sort().values
        found |= {name: found[name].index_select(dim, kept) for name, dim in parts.items()}
    return found


def block_loss(
    drafter: BlockHead,
    seen: Seen,
    output: Callable[[Tensor], Tensor],
    at: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy and mean overlap Σ min(p, q) by level [K] for anchors ``at`` [B, A] of
    pictures that the target has ``seen``.

    They compare the drafter's distribution of a level, given the true token before it, with the
    target's there, both at ``temperature``. The overlap is 1 less the total variation, which is
    what acceptance loses. ``output`` gives logits [B, N, V] of states [B, N, C].

    At anchor a, whose root is token a, the features of positions up to a are seen and tokens a + 1
    … a + K drafted.
    """
    levels = drafter.config.levels
    count = seen.hidden.shape[1]
    features = drafter.features(seen.embedded, seen.hidden)  # e_i holds hidden i and token i
    order = torch.arange(count)[None]
    wanted = at[..., None] + 1 + torch.arange(levels)  # [B, A, K] tokens drafted
    anchor = features.gather(1, at[..., None].expand(-1, -1, features.shape[-1]))
    x = torch.cat([features, drafter.queries(anchor, levels)], dim=1)  # [B, T + A·K, C]
    cells = torch.cat([order.expand(len(at), -1), wanted.flatten(1)], dim=1)
    latest = torch.cat([order.expand(len(at), -1), at.repeat_interleave(levels, dim=1)], dim=1)
    shown = order[:, None] <= latest[..., None]  # [B, T + A·K, T]: nothing attends a query
    bias = torch.zeros(shown.shape).masked_fill_(~shown, float("-inf"))
    bias = F.pad(bias, (0, wanted[0].numel()), value=float("-inf"))[:, None].to(seen.hidden.dtype)
    states = drafter(x, cells, bias, queries=wanted[0].numel())
    previous = seen.tokens.gather(1, wanted.flatten(1) - 1)
    drafted = output(drafter.read(states, previous)).float() / temperature
    drafted = drafted.log_softmax(-1)  # [B, A·K, V]
    probs = (seen.logits.float() / temperature).softmax(-1)
    probs = probs.gather(1, wanted.flatten(1)[..., None].expand_as(drafted))
    overlap = torch.minimum(probs, drafted.exp()).sum(-1).unflatten(1, (-1, levels))
    cross_entropy = -(probs * drafted).sum(-1).mean()
    return cross_entropy, overlap.mean((0, 1))


def measure_taus(target: DrawingTarget, prompt: Any, seeds: Sequence[int]) -> dict[str, float]:
    """Tokens a round of the methods without a drafter, over one batch of pictures, one seed
    each.
    """
    found = {}
    for name, method in JACOBI.items():
        own, drafter, rule = assemble(method, target, PictureParts())
        uniforms = Uniforms.from_seeds(seeds, own.device)
        *_, end = decode(own, drafter, rule, prompt, own.length, uniforms)
        found[name] = round(end.stats.tau, 4)
    return found


def measure_acceptance(
    head: BlockHead, target: LlamaGenTarget, prompt: Any, seeds: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """How often the block drafter's child of a level and rank is the one kept, over one batch of
    pictures, one seed each, under exact decoding.
    """
    shape = spine(WIDEST[: head.config.levels], target.device)
    counter = AcceptanceCounter(BlockDrafter(head, target, shape), shape)
    uniforms = Uniforms.from_seeds(seeds, target.device)
    for _ in decode(target, counter, Recursive(), prompt, target.length, uniforms):
        pass
    return counter.table()
