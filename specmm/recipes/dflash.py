"""Training of a DFlash block drafter on the frozen target's hidden states.

Blocks lie at random anchors and read the target's states of the text before them; draft k has the
weight exp(-(k - 1) / fade). Source: DFlash (arXiv 2602.06036), but learning distributions instead
of tokens.

Shape letters: B batch, L tokens of a row, A anchors, K block (anchor included), F layers read, C
width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from transformers import Qwen3Config

from specmm.core.randomness import seeded
from specmm.diffusion_drafters.models.dflash import (
    CACHE,
    DFlash,
    context_keys,
    load_dflash,
    save_dflash,
)
from specmm.diffusion_drafters.models.dflash_config import DFlashConfig, Reach
from specmm.hf.drafters.files import check_target
from specmm.hf.models.target import VLMTarget
from specmm.loading.checkpoints import embeddings_of, read_json
from specmm.recipes.features import layer_sizes, spread
from specmm.recipes.loop import Losses
from specmm.recipes.losses import Head
from specmm.recipes.recipe import Count, Found, Recipe, Size
from specmm.recipes.settings import Targeted
from specmm.recipes.source import Source
from specmm.recipes.training.blocks import ANCHORS, Anchors, along, fading, probs_loss, silence
from specmm.recipes.training.seen import Seen
from specmm.recipes.training.small_qwen import compile_layers

# of a block drafter, which start brings
SIZES = ("layers", "block", "mask", "inner", "read", "markov", "vocabulary")
Block = Annotated[int, 2]  # drafts a round


def dflash(
    *,
    model: str,
    source: Source,
    training: Targeted,
    layers: Count,
    block: Block,
    mask: Size | None,
    inner: Size,
    read: Count,
    markov: Size,
    recurrent: Size,
    vocabulary: Size,
    start: Path | None,
    fade: Annotated[float, 0.1],
    recipe: Recipe,
) -> Found:
    """Train a DFlash block drafter on the target's hidden states; the result is drafters/block.

    With ``start`` it begins with another drafter's weights, sizes and tokens; ``recurrent`` then
    adds a memory.
    """
    begun = training.begun(model, "block", recipe)
    target = begun.target
    if start is not None:
        if chosen_sizes := [name for name in SIZES if name in recipe.chosen]:
            raise ValueError(f"start brings the drafter's own sizes, leave out {chosen_sizes[0]}")
        check_target(read_json(start / "config.json"), target.model, start)
        drafter = with_memory(load_dflash(start, torch.float32).to(target.device), recurrent)
    else:
        hidden = begun.mask(mask)
        layers_read(target, read)  # a mistake is told before rows are drawn, which takes minutes
    lessons = source.lessons(begun)
    if start is None:
        drafted = lessons.vocabulary(vocabulary)
        sizes = (layers, block + 1, hidden, read, inner, markov, recurrent)
        drafter = build_block(target, *sizes, drafted)
    compile_layers(drafter.layers)
    head = target.family.logits_of(drafter.ids)

    def loss(seen: Seen, i: int) -> Losses:
        seen = seen.with_room(drafter.config.block)
        seed = training.seed * 1_000_003 + i
        return block_loss(drafter, target, head, seen, ANCHORS, fade, seed, training.loss)

    save = partial(save_dflash, drafter, begun.place, embeddings_of(target.model))
    return begun.learn(lessons, drafter, loss, save, layers=drafter.config.layers)


def build_block(
    target: VLMTarget,
    layers: int,
    block: int,
    mask: int,
    read: int = 4,
    inner: int = 0,
    markov: int = 0,
    recurrent: int = 0,
    ids: Tensor | None = None,
) -> DFlash:
    """A drafter of ``layers`` for rounds of ``block`` - 1 drafts, which reads ``read`` of the
    target's layers.

    The layers that it reads lie evenly between the second and the third last, as in the release.
    ``inner`` is the width of its feed-forward layers (0: the target's), ``markov`` the rank of its
    table of pairs and ``recurrent`` the size of its memory (0: none), ``ids`` [v] are the target's
    tokens that it drafts (None: all). Raises ``ValueError`` as ``layers_read``, and for a target
    whose layers have no known name.
    """
    chosen = layers_read(target, read)
    room = int(target.family.config.max_position_embeddings) + block
    sizes = layer_sizes(Qwen3Config, target, layers, inner, max_position_embeddings=room)
    with seeded(0):
        count = 0 if ids is None else len(ids)
        model = DFlash(DFlashConfig(sizes, block, mask, chosen, count, markov, recurrent))
        spread(model, sizes)
        if model.markov is not None:
            model.markov.before.weight.data.normal_(0, sizes.initializer_range)
            model.markov.after.weight.data.zero_()  # the table adds nothing at first
        if model.recurrent is not None:
            silence(model.recurrent)
    if ids is not None:
        model.set_ids(ids.sort().values)
    return model.to(target.device)


def layers_read(target: VLMTarget, read: int) -> tuple[int, ...]:
    """The ``read`` layers of the target whose states a drafter reads, lowest first.

    Raises ``ValueError`` for more layers than there are before the last.
    """
    depth = len(target.family.layers)
    if not 1 <= read < depth:
        raise ValueError(
            f"read must be 1 to {depth - 1}, the number of the target's layers before its last, "
            f"got {read}"
        )
    places = torch.linspace(1, max(depth - 3, 0), read) if depth - 1 > read else torch.arange(read)
    return tuple(dict.fromkeys(places.round().int().tolist()))


def with_memory(before: DFlash, size: int) -> DFlash:
    """A drafter that drafts as ``before`` does, with an untrained memory of ``size`` (0:
    unchanged).

    Raises ``ValueError`` if it has a memory of another size.
    """
    config = before.config
    if size and config.recurrent not in (0, size):
        raise ValueError(f"recurrent must be the drafter's own {config.recurrent} or 0, got {size}")
    with seeded(0):
        model = DFlash(dataclasses.replace(config, recurrent=size or config.recurrent))
    if model.recurrent is not None and before.recurrent is None:
        silence(model.recurrent)
    model.load_state_dict(before.state_dict(), strict=False)
    if model.ids is not None:
        model.set_ids(model.ids)
    return model.to(before.fc.weight.device)


def block_loss(
    model: DFlash,
    target: VLMTarget,
    head: Head,
    data: Seen,
    anchors: int,
    fade: float,
    seed: int,
    loss: str = "kl",
) -> Losses:
    """The ``loss`` of the rows' blocks on learnt tokens; ``head`` has only the drafter's tokens."""
    rows = len(data.tokens)
    device = data.tokens.device
    size = model.config.block
    drawn = Anchors.draw(data.mask[:, :-1], anchors, size - 1, size, seed)
    drawn = Anchors(drawn.places.to(device) + 1, size)  # an anchor needs a context
    ids = torch.full((rows, anchors, size), model.config.mask, device=device)
    ids[..., 0] = data.tokens.gather(1, drawn.places)
    states = blocks_after(model, data.context, target.embed(ids.flatten(1)), drawn)
    states = states[:, :, 1:]  # [B, A, K - 1, C]
    # The target's distribution of a token comes from its state one place before.
    places = drawn.after(size - 1).flatten(1)
    target_states = data.hidden.gather(1, places[..., None].expand(-1, -1, data.hidden.shape[-1]))
    before = data.tokens.gather(1, places).view(states.shape[:3])
    if model.recurrent is not None:
        states = along(model.recurrent, states, target.embed(before))
    pairs = None if model.markov is None else model.pairs(before)
    counted = data.mask.gather(1, places).view(states.shape[:3])
    weights = fading(size - 1, fade).to(device) * counted
    return probs_loss(states, target_states.view_as(states), weights, head, pairs, loss)


def blocks_after(
    model: DFlash,
    context: Tensor,
    embeddings: Tensor,
    drawn: Anchors,
    reaches: Sequence[Reach] = (),
) -> Tensor:
    """States [B, A, K, C] of blocks of ``embeddings`` [B, A·K, C] after ``context`` [B, L, F·C], to
    which each layer attends within its ``reaches`` (empty: everywhere).
    """
    length = context.shape[1]
    positions = torch.arange(length, device=context.device)[None]
    prefix = _Prefix(context_keys(model, context, positions))
    turns = model.turns(embeddings, drawn.after(drawn.size).flatten(1))
    drawn_by = {reach: drawn.reached(length, reach) for reach in {Reach(), *reaches}}
    x = embeddings
    for layer, reach in zip(model.layers, reaches or [Reach()] * len(model.layers), strict=True):
        mask = drawn_by[reach].to(x.dtype)
        x = layer(x, attention_mask=mask, position_embeddings=turns, **{CACHE: prefix})
    return model.norm(x).unflatten(1, (-1, drawn.size))


class _Prefix:
    """A cache that prepends each layer's context keys and values [B, H, L, D] to the blocks'."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.pairs = pairs

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        old_keys, old_values = self.pairs[layer]
        values = torch.cat([old_values.to(values.dtype), values], dim=2)
        return torch.cat([old_keys, keys], dim=2), values
