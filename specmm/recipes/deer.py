"""Training of a DEER drafter in two stages, with the target frozen.

Stage 1 hides a random share of each block and learns to fill it in, weighted by one over the share.
Stage 2 hides the whole block, of random length R, and weighs position i by alpha to the power of R
- i: tokens right after the text count most. Source: DEER (arXiv 2512.15176). Unlike there, no end
mark is appended to truncated text, because blocks lie inside a row, and distributions are learnt
instead of tokens.

Shape letters: B batch, L tokens of a row, A anchors, K drafts of a block, N positions of all
blocks, C width.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from specmm.core.randomness import seeded
from specmm.diffusion_drafters.models.deer import DEERModel, save_deer, share
from specmm.hf.drafters.files import QWEN_SIZES
from specmm.hf.models.target import VLMTarget
from specmm.recipes.loop import Losses
from specmm.recipes.recipe import Count, Found, Recipe, Share, Size
from specmm.recipes.settings import Targeted
from specmm.recipes.source import Source
from specmm.recipes.training.blocks import ANCHORS, Anchors, probs_loss
from specmm.recipes.training.seen import Seen
from specmm.recipes.training.small_qwen import compile_layers

Block = Annotated[int, 2]  # drafts a round


def deer(
    *,
    model: str,
    source: Source,
    training: Targeted,
    layers: Count,
    block: Block,
    mask: Size | None,
    inner: Size,
    first_stage: Share,
    alpha: Annotated[float, 1],
    recipe: Recipe,
) -> Found:
    """Train a DEER drafter (its own layers, the target's embedding and head) in drafters/deer."""
    begun = training.begun(model, "deer", recipe)
    target, end = begun.target, begun.tokenizer.eos_token_id
    drafter = build_deer(target, layers, block, begun.mask(mask), end, inner)
    lessons = source.lessons(begun)
    first = first_stage * begun.steps(lessons.rows) * training.accumulate
    compile_layers(drafter.model.model.layers)

    def loss(seen: Seen, i: int) -> Losses:
        seed = training.seed * 1_000_003 + i
        seen = seen.with_room(block)
        return deer_loss(drafter, target, seen, ANCHORS, i < first, alpha, seed, training.loss)

    save = partial(save_deer, drafter, begun.place)
    return begun.learn(lessons, drafter, loss, save, network=Own(drafter.model))


def build_deer(
    target: VLMTarget, layers: int, block: int, mask: int, end: int | None, inner: int = 0
) -> DEERModel:
    """A drafter of ``layers`` with the embedding and the head of ``target``, initialised with the
    target's first layers.

    ``inner`` is the width of its feed-forward layers (0: the target's). Raises ``ValueError`` for a
    target whose layers are not Qwen2's or Llama's.
    """
    sizes = _sizes(target.family.config)
    sizes["max_position_embeddings"] += block
    sizes |= {"num_hidden_layers": layers, "intermediate_size": inner or sizes["intermediate_size"]}
    with seeded(0):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**sizes))
    _copy_layers(model.model.layers, target.family.layers)
    model.model.norm.load_state_dict(target.family.decoder.norm.state_dict())
    share(model, target.model)
    return DEERModel(model, mask, block, end, shared=True)


def _sizes(config: Any) -> dict[str, Any]:
    """Sizes and rotary base of a target; raises ``ValueError`` if Qwen2 cannot have them."""
    # The rotary base is given by kind of layer where kinds differ.
    base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    sizes = {name: getattr(config, name, None) for name in QWEN_SIZES} | {"rope_theta": base}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise ValueError(
            f"target must have a Qwen2's or Llama's layers, got {config.model_type!r} with no "
            f"{missing[0]} for all; train a block drafter (dflash) instead"
        )
    del sizes["rope_theta"]
    return sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


@torch.no_grad()
def _copy_layers(layers: Any, others: Any) -> None:
    """Copy the weights of ``others`` that fit; biases, which Llama lacks, are then 0."""
    for layer, other in zip(layers, others, strict=False):
        state = layer.state_dict()
        theirs = other.state_dict()
        fitting = {k: v for k, v in theirs.items() if k in state and state[k].shape == v.shape}
        layer.load_state_dict(fitting, strict=False)


class Own(torch.nn.Module):
    """Only the drafter's own weights, for checkpoints without the target's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = model.model.layers
        self.norm = model.model.norm


def deer_loss(
    drafter: DEERModel,
    target: VLMTarget,
    data: Seen,
    anchors: int,
    filling: bool,
    alpha: float,
    seed: int,
    loss: str = "kl",
) -> Losses:
    """The ``loss`` of the rows' blocks and of the first draft at every position, on learnt tokens
    only; ``filling`` is stage 1.
    """
    tokens = data.tokens
    masks = drafter.block - 1
    rows, length = tokens.shape
    device = tokens.device
    drawn = Anchors.draw(data.learnt, anchors, drafter.block, masks, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    hidden, weights = _hide(rows, anchors, masks, generator, filling, alpha)
    places = drawn.after(masks, 1)  # the blocks' own positions [B, A, K - 1]
    true = tokens.gather(1, places.flatten(1).to(device)).view(places.shape)
    ids = torch.where(hidden.to(device), drafter.mask, true)
    present = None if filling else weights > 0
    states = _forward(drafter, tokens, ids, drawn, present)  # [B, L + N, C]
    blocks = states[:, length:].unflatten(1, (anchors, masks))
    index = places.flatten(1)[..., None].to(device)
    target_states = data.hidden.gather(1, index.expand(-1, -1, data.hidden.shape[-1]))
    counted = data.mask
    weights = weights.to(device) * counted.gather(1, index[..., 0]).view(places.shape)
    losses = probs_loss(blocks, target_states.view_as(blocks), weights, target.head, loss=loss)
    even = counted[:, None].float()
    first = probs_loss(states[:, None, :length], data.hidden[:, None], even, target.head, loss=loss)
    part = 1 / drafter.block
    mixed = part * first["loss"] + (1 - part) * losses["loss"]
    return {**losses, "loss": mixed, "first": first["first"]}


def _hide(
    rows: int, anchors: int, masks: int, generator: torch.Generator, filling: bool, alpha: float
) -> tuple[Tensor, Tensor]:
    """The mask [B, A, K - 1] of hidden positions, and the positions' weights."""
    shape = (rows, anchors, masks)
    if filling:
        share = torch.rand(rows, anchors, 1, generator=generator).clamp(min=0.1)
        hidden = torch.rand(shape, generator=generator) < share
        # A row scores the token after it, so what counts is whether that one is hidden.
        scored = F.pad(hidden[..., 1:], (0, 1), value=True)
        return hidden, scored / share
    reach = torch.randint(1, masks + 1, (rows, anchors, 1), generator=generator)  # R
    order = torch.arange(masks)
    return torch.ones(shape, dtype=torch.bool), (alpha ** (reach - 1 - order)) * (order < reach)


def _forward(
    drafter: DEERModel, tokens: Tensor, ids: Tensor, drawn: Anchors, present: Tensor | None
) -> Tensor:
    """States [B, L + N, C] of rows, read causally, and of their blocks' ``ids`` [B, A, K - 1]."""
    rows, length = tokens.shape
    device = tokens.device
    order = torch.arange(length, device=device)
    blocks = drawn.bias(length, 0, present).to(device)
    text = torch.full((length, blocks.shape[-1]), float("-inf"), device=device)
    text[:, :length].masked_fill_(order <= order[:, None], 0)
    bias = torch.cat([text.expand(rows, 1, -1, -1), blocks], dim=2)
    places = drawn.after(drawn.size, 1).flatten(1).to(device)
    read = drafter.model.model(
        input_ids=torch.cat([tokens, ids.flatten(1)], dim=1),
        attention_mask=bias,
        position_ids=torch.cat([order.expand(rows, -1), places], dim=1),
        use_cache=False,
    )
    return read.last_hidden_state
