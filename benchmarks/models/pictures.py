"""What vision towers take: pictures as the processors of most types give them.

Shape letters: N pictures, B rows, P patches, S side of a picture in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Rows = Sequence[Sequence[int]]  # the seeds of the pictures of each row


def noise(seed: int, *shape: int) -> Tensor:
    """A picture by its ``seed``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_order(rows: Rows) -> list[int]:
    """The seeds of all pictures."""
    return [seed for row in rows for seed in row]


def vision_of(config: Any) -> Any:
    """The config of the vision tower."""
    return getattr(config, "vision_config", None)


def side(config: Any) -> tuple[int, int]:
    """Height and width of a picture in pixels."""
    size = getattr(vision_of(config), "image_size", None) or 16
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def plain(config: Any, rows: Rows) -> Inputs:
    """Pictures one after another, all of one size [N, 3, S, S]."""
    pixels = [noise(seed, 1, 3, *side(config)) for seed in in_order(rows)]
    return {"pixel_values": torch.cat(pixels)}


def tiles(config: Any, rows: Rows) -> Inputs:
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


def grids(config: Any, rows: Rows) -> Inputs:
    """Patches one after another [P, 3 · time · size · size] and each picture's grid [N, 3]."""
    vision = vision_of(config)
    high, wide = pair(vision.patch_size)
    frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
    time = pair(frames)[0]
    sizes = {seed: grid_of(config, seed) for seed in in_order(rows)}
    seeds = in_order(rows)
    pixels = [noise(s, sizes[s][0] * sizes[s][1], 3 * time * high * wide) for s in seeds]
    found = torch.tensor([[1, *sizes[seed]] for seed in seeds])
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": found}


def positioned(config: Any, rows: Rows) -> Inputs:
    """Patches by picture, filled up [N, P, 3 · size · size], and the place of each [N, P, 2]."""
    vision = vision_of(config)
    pooled = getattr(vision, "pooling_kernel_size", 1)
    seeds = in_order(rows)
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
