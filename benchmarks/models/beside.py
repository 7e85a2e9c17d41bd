"""Prompts of types whose pictures have no placeholder in the prompt: one stands beside each row.

Encoder-decoders that read nothing but a picture, decoders that look at it by cross-attention, and
those that put it before the row or where a mask says.

Shape letters: B batch, L prompt positions, P patches, S side of a picture in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.models.pictures import noise, picture_prompts, placeholder, side, takes
from benchmarks.models.prompts import ROWS, Inputs, left_padded, text_prompts
from benchmarks.models.tiny import BOS

Words = Sequence[Sequence[int]]
PATCHES = (6, 4, 8)  # of the pictures of three rows
START = 100
END = 101
FIRST = 102  # of the tokens that stand for a picture
ONE_TWO = torch.tensor([1, 2])


def any_prompts(model: PreTrainedModel) -> dict[str, Inputs]:
    """Prompts of a type that takes pictures, or of one that takes none after all."""
    if not any(takes(model, name) for name in ("pixel_values", "flattened_patches")):
        return text_prompts()
    make = BY_TYPE.get(model.config.model_type)
    if make is None and placeholder(model.config) is not None:
        return picture_prompts(model)
    make = make or picture_and_text
    return {"picture": make(model.config, ROWS[:1]), "batch": make(model.config, ROWS)}


def picture_only(config: Any, rows: Words) -> Inputs:
    """A picture for each row [B, 3, S, S], which is all that the encoder reads."""
    height, width = side(config)
    pixels = [noise(seed, 1, 3, height, width) for seed, _ in enumerate(rows)]
    return {"pixel_values": torch.cat(pixels)}


def picture_and_text(config: Any, rows: Words) -> Inputs:
    """The same, and the rows."""
    return {**left_padded(rows), **picture_only(config, rows)}


def patches_only(config: Any, rows: Words) -> Inputs:
    """Flat patches [B, P, 2 + size], each after its place, filled up with zeros, and their mask."""
    width = config.vision_config.patch_embed_hidden_size
    found = torch.zeros(len(rows), max(PATCHES), 2 + width)
    for seed, _ in enumerate(rows):
        count = PATCHES[seed]
        found[seed, :count, :2] = torch.cartesian_prod(torch.arange(1, 1 + count // 2), ONE_TWO)
        found[seed, :count, 2:] = noise(seed, count, width)
    mask = (found != 0).any(-1).float()
    return {"flattened_patches": found, "attention_mask": mask}


def picture_in_place(config: Any, rows: Words) -> Inputs:
    """A picture after each row's first token, and where [B, L]."""
    stand_ins = [START, *range(FIRST, FIRST + config.latent_query_num), END]
    found = picture_and_text(config, [[row[0], *stand_ins, *row[1:]] for row in rows])
    ids = found["input_ids"]
    places = (ids >= FIRST) & (ids < FIRST + config.latent_query_num)
    return {**found, "image_embeds_position_mask": places.long()}


def patches_in_place(config: Any, rows: Words) -> Inputs:
    """The same with flat patches."""
    found = picture_in_place(config, rows)
    del found["pixel_values"]
    return {**found, "flattened_patches": patches_only(config, rows)["flattened_patches"]}


def looked_at(config: Any, rows: Words) -> Inputs:
    """A picture for each row [B, 1, 3, S, S], and which tokens look at it: all but the first and
    padding [B, L, 1].
    """
    found = picture_and_text(config, rows)
    mask = found["attention_mask"]
    looking = mask * (found["input_ids"] != BOS)
    return {
        **found,
        "pixel_values": found["pixel_values"][:, None],
        "image_attention_mask": looking[..., None],
    }


def on_a_page(config: Any, rows: Words) -> Inputs:
    """A page for each row, and where on it each token stands [B, L, 4], in parts of the page."""
    found = picture_and_text(config, rows)
    length = found["input_ids"].shape[1]
    corner = torch.rand(len(rows), length, 2, generator=torch.Generator().manual_seed(0)) / 2
    return {**found, "bbox": torch.cat([corner, corner + 0.25], dim=-1)}


BY_TYPE: dict[str, Callable[[Any, Words], Inputs]] = {
    "idefics": looked_at,
    "kosmos-2": picture_in_place,
    "kosmos-2.5": patches_in_place,
    "pix2struct": patches_only,
    "pp_formulanet": picture_only,
    "udop": on_a_page,
    "vision-encoder-decoder": picture_only,
}
