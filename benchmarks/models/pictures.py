"""Prompts with pictures for tiny models, as the processor of each type would give them.

What a type's forward takes tells its kind: pictures by a grid of patches, by sizes, in tiles, or
as they are. How many tokens stand for a picture is asked of the model's own vision features.

Shape letters: N pictures, P patches, S side of a picture in pixels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.models.prompts import BOS, WORDS, Inputs, left_padded, text_prompts

Row = list[int | str]  # ids of words, and pictures by their seeds
PICTURE: Row = [BOS, *WORDS[:8], "1", *WORDS[3:]]
PICTURES: Row = [BOS, *WORDS[:3], "2", 18, "3", *WORDS]
ROWS: tuple[Row, ...] = (PICTURES, [BOS, *WORDS[5:], *WORDS[:4]], ["1", *WORDS[2:9]])
STARTS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
ENDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
PLACEHOLDERS = ("image_token_id", "image_token_index", "image_patch_id")


def picture_prompts(model: PreTrainedModel) -> dict[str, Inputs]:
    """Text, one picture, two, and a ragged batch whose second row has none."""
    return {
        **{name: text for name, text in text_prompts().items() if name == "text"},
        "picture": Prompts(model).of([PICTURE]),
        "pictures": Prompts(model).of([PICTURES]),
        "batch": Prompts(model).of(ROWS),
    }


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the forward of ``model`` has an argument ``name``."""
    return name in inspect.signature(model.forward).parameters


class Prompts:
    """Prompts of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self.image = first_of(self.config, PLACEHOLDERS)
        if self.image is None:
            raise ValueError("its config names no placeholder of pictures")
        self.vision = self._vision()

    def _vision(self) -> Callable[[Sequence[Sequence[int]]], Inputs]:
        by_type = BY_TYPE.get(self.config.model_type)
        if by_type is not None:
            make = by_type
        elif takes(self.model, "image_grid_thw"):
            make = grids
        elif takes(self.model, "image_position_ids"):
            make = positioned
        elif takes(self.model, "pixel_attention_mask") or takes(self.model, "pixel_mask"):
            make = tiles
        else:
            make = plain
        return lambda rows: make(self.config, rows)

    def of(self, rows: Sequence[Row]) -> Inputs:
        """Inputs of a batch of ``rows``."""
        seeds = [[int(part) for part in row if isinstance(part, str)] for row in rows]
        inputs = left_padded([self._ids(row) for row in rows])
        if any(seeds):
            inputs |= self.vision(seeds)
        pictures = (inputs["input_ids"] == self.image).int()
        if takes(self.model, "mm_token_type_ids"):
            inputs["mm_token_type_ids"] = pictures
        if takes(self.model, "token_type_ids"):
            # PaliGemma's mark what is answered, and all of the prompt is not
            whole = self.config.model_type == "paligemma"
            inputs["token_type_ids"] = torch.zeros_like(pictures) if whole else pictures
        return inputs

    def _ids(self, row: Row) -> list[int]:
        parts = ([part] if isinstance(part, int) else self._stand_ins(int(part)) for part in row)
        return [token for part in parts for token in part]

    def _stand_ins(self, seed: int) -> list[int]:
        start = first_of(self.config, STARTS)
        end = first_of(self.config, ENDS)
        middle = [self.image] * self.count(seed)
        return [*([] if start is None else [start]), *middle, *([] if end is None else [end])]

    @torch.no_grad()
    def count(self, seed: int) -> int:
        """How many tokens stand for the picture ``seed``."""
        whole: Any = self.model
        source = whole if hasattr(whole, "get_image_features") else whole.model
        found = source.get_image_features(**self.vision([[seed]]))
        features = getattr(found, "pooler_output", found)
        parts = [features] if isinstance(features, Tensor) else list(features)
        width = parts[0].shape[-1]
        return sum(part.numel() for part in parts) // width


def first_of(config: Any, names: Sequence[str]) -> int | None:
    """The first of the fields ``names`` that ``config`` holds."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def noise(seed: int, *shape: int) -> Tensor:
    """A picture by its ``seed``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vision_of(config: Any) -> Any:
    """The config of the vision tower."""
    names = ("vision_config", "high_res_vision_config", "vision_tower_config")
    return next(getattr(config, n) for n in names if getattr(config, n, None) is not None)


def side(config: Any) -> tuple[int, int]:
    """Height and width of a picture in pixels."""
    size = getattr(vision_of(config), "image_size", None) or 16
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def plain(config: Any, rows: Sequence[Sequence[int]]) -> Inputs:
    """Pictures one after another, all of one size [N, 3, S, S]."""
    pixels = [noise(seed, 1, 3, *side(config)) for row in rows for seed in row]
    return {"pixel_values": torch.cat(pixels)}


def tiles(config: Any, rows: Sequence[Sequence[int]]) -> Inputs:
    """Pictures by row, rows with fewer filled up with zeros [B, N, 3, S, S]."""
    most = max(map(len, rows))
    height, width = side(config)
    pixels = torch.zeros(len(rows), most, 3, height, width)
    for i, row in enumerate(rows):
        for j, seed in enumerate(row):
            pixels[i, j] = noise(seed, 3, height, width)
    return {"pixel_values": pixels}


def pair(value: Any) -> tuple[int, int]:
    """A size that may be given for both directions at once."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def grid_of(config: Any, seed: int) -> tuple[int, int]:
    """Height and width of a picture in patches, multiples of what is merged."""
    vision = vision_of(config)
    merged = getattr(vision, "merge_kernel_size", None) or getattr(
        vision, "spatial_merge_size", getattr(vision, "merge_size", 2)
    )
    high, wide = pair(merged)
    return 2 * high, (1 + seed % 3) * wide


def grids(config: Any, rows: Sequence[Sequence[int]]) -> Inputs:
    """Patches one after another [P, 3 · time · size · size] and each picture's grid [N, 3]."""
    vision = vision_of(config)
    high, wide = pair(vision.patch_size)
    time = pair(getattr(vision, "temporal_patch_size", 1))[0]
    sizes = {seed: grid_of(config, seed) for row in rows for seed in row}
    seeds = [seed for row in rows for seed in row]
    pixels = [noise(s, sizes[s][0] * sizes[s][1], 3 * time * high * wide) for s in seeds]
    found = torch.tensor([[1, *sizes[seed]] for seed in seeds])
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": found}


def positioned(config: Any, rows: Sequence[Sequence[int]]) -> Inputs:
    """Patches by picture, filled up [N, P, 3 · size · size], and the place of each [N, P, 2]."""
    vision = vision_of(config)
    pooled = getattr(vision, "pooling_kernel_size", 1)
    seeds = [seed for row in rows for seed in row]
    most = 3 * 2 * pooled**2
    width = 3 * vision.patch_size**2
    pixels = torch.zeros(len(seeds), most, width)
    places = torch.full((len(seeds), most, 2), -1)
    for i, seed in enumerate(seeds):
        high = 2 * pooled
        wide = (1 + seed % 3) * pooled
        pixels[i, : high * wide] = noise(seed, high * wide, width).sigmoid()
        where = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(-1)
        places[i, : high * wide] = where
    return {"pixel_values": pixels, "image_position_ids": places}


BY_TYPE: dict[str, Callable[[Any, Sequence[Sequence[int]]], Inputs]] = {}
