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
from benchmarks.models.tiny import PLACEHOLDERS

Rows = Sequence[Sequence[int]]  # the seeds of the pictures of each row
Row = list[int | str]  # ids of words, and pictures by their seeds
PICTURE: Row = [BOS, *WORDS[:8], "1", *WORDS[3:]]
PICTURES: Row = [BOS, *WORDS[:3], "2", 18, "3", *WORDS]
ROWS: tuple[Row, ...] = (PICTURES, [BOS, *WORDS[5:], *WORDS[:4]], ["1", *WORDS[2:9]])
STARTS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
ENDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")


def picture_prompts(model: PreTrainedModel) -> dict[str, Inputs]:
    """Text, one picture, two, and a ragged batch whose second row has none where it may."""
    each = takes(model, "cross_attention_mask")  # rows without pictures are not mixed in
    return {
        **{name: text for name, text in text_prompts().items() if name == "text"},
        "picture": Prompts(model).of([PICTURE]),
        "pictures": Prompts(model).of([PICTURES]),
        "batch": Prompts(model).of([ROWS[0], PICTURE, ROWS[2]] if each else ROWS),
    }


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the forward of ``model`` has an argument ``name``."""
    return name in inspect.signature(model.forward).parameters


class Prompts:
    """Prompts of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self.image = placeholder(self.config)
        self.vision = self._vision()

    def _vision(self) -> Callable[[Rows], Inputs]:
        by_type = BY_TYPE.get(self.config.model_type)
        if by_type is not None:
            make = by_type
        elif takes(self.model, "image_grid_thw"):
            make = grids
        elif takes(self.model, "image_position_ids"):
            make = positioned
        elif hasattr(self.config, "image_grid_pinpoints"):
            make = pinpoints
        elif takes(self.model, "target_sizes"):
            make = strips
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
        if takes(self.model, "cross_attention_mask") and any(seeds):
            inputs["cross_attention_mask"] = self._attended(inputs)
        return inputs

    def _attended(self, inputs: Inputs) -> Tensor:
        """Which tiles each token attends to: those of the picture before it [B, L, N, 4]."""
        before = (inputs["input_ids"] == self.image).cumsum(1)  # pictures so far
        pictures = torch.arange(1, inputs["pixel_values"].shape[1] + 1)
        attended = (before[..., None] == pictures)[..., None]
        return (attended & (inputs["aspect_ratio_mask"] > 0)[:, None]).long()

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
        if takes(self.model, "cross_attention_mask"):
            return 1
        whole: Any = self.model
        source = whole if hasattr(whole, "get_image_features") else whole.model
        found = source.get_image_features(**self.vision([[seed]]))
        features = getattr(found, "pooler_output", found)
        features = found.last_hidden_state if features is None else features
        parts = [features] if isinstance(features, Tensor) else list(features)
        width = parts[0].shape[-1]
        return sum(part.numel() for part in parts) // width


def first_of(config: Any, names: Sequence[str]) -> int | None:
    """The first of the fields ``names`` that ``config`` holds."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def placeholder(config: Any) -> int | None:
    """The id that stands for pictures, if there is one."""
    return first_of(config, PLACEHOLDERS)


def noise(seed: int, *shape: int) -> Tensor:
    """A picture by its ``seed``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vision_of(config: Any) -> Any:
    """The config of the vision tower."""
    names = ("vision_config", "high_res_vision_config", "vision_tower_config", "encoder")
    found = (getattr(config, name, None) for name in names)
    inner = next((one for one in found if one is not None), None)
    return config if inner is None else vision_of(inner)


def side(config: Any) -> tuple[int, int]:
    """Height and width of a picture in pixels."""
    size = getattr(vision_of(config), "image_size", None) or 16
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def plain(config: Any, rows: Rows) -> Inputs:
    """Pictures one after another, all of one size [N, 3, S, S]."""
    pixels = [noise(seed, 1, 3, *side(config)) for row in rows for seed in row]
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
    sizes = {seed: grid_of(config, seed) for row in rows for seed in row}
    seeds = [seed for row in rows for seed in row]
    pixels = [noise(s, sizes[s][0] * sizes[s][1], 3 * time * high * wide) for s in seeds]
    found = torch.tensor([[1, *sizes[seed]] for seed in seeds])
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": found}


def positioned(config: Any, rows: Rows) -> Inputs:
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


def sized(config: Any, rows: Rows) -> Inputs:
    """Pictures of several widths, filled up [N, 3, S, S], and the size of each [N, 2]."""
    height, width = side(config)
    seeds = [seed for row in rows for seed in row]
    sizes = [(height, width if seed % 2 else width // 2) for seed in seeds]
    pixels = torch.zeros(len(seeds), 3, height, width)
    for i, (seed, (high, wide)) in enumerate(zip(seeds, sizes, strict=True)):
        pixels[i, :, :high, :wide] = noise(seed, 3, high, wide)
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def pinpoints(config: Any, rows: Rows) -> Inputs:
    """Two tiles and the whole picture, for each [N, 3, 3, S, S], and the size of each [N, 2]."""
    height, width = side(config)
    seeds = [seed for row in rows for seed in row]
    sizes = [(height, 2 * width) if seed % 2 else (2 * height, width) for seed in seeds]
    pixels = torch.stack([noise(seed, 3, 3, height, width) for seed in seeds])
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def spatial(config: Any, rows: Rows) -> Inputs:
    """Patches by picture, filled up [N, P, 3 · size · size], their mask, and heights and widths."""
    seeds = [seed for row in rows for seed in row]
    width = 3 * vision_of(config).patch_size ** 2
    sizes = [(4, 2 + 2 * (seed % 2)) for seed in seeds]
    pixels = torch.zeros(len(seeds), 16, width)
    mask = torch.zeros(len(seeds), 16, dtype=torch.int64)
    for i, (seed, (high, wide)) in enumerate(zip(seeds, sizes, strict=True)):
        pixels[i, : high * wide] = noise(seed, high * wide, width)
        mask[i, : high * wide] = 1
    shapes = torch.tensor(sizes)
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def square_patches(config: Any, rows: Rows) -> Inputs:
    """As :func:`grids`, each patch a picture [P, 3, size, size]."""
    size = vision_of(config).patch_size
    found = grids(config, rows)
    return {**found, "pixel_values": found["pixel_values"].view(-1, 3, size, size)}


def merged_patches(config: Any, rows: Rows) -> Inputs:
    """Blocks of patches that are merged, channels last, and the grid of blocks."""
    vision = vision_of(config)
    block = vision.spatial_merge_size * vision.patch_size
    seeds = [seed for row in rows for seed in row]
    sizes = [(2, 1 + seed % 3) for seed in seeds]
    pixels = [noise(s, h * w, block, block, 3) for s, (h, w) in zip(seeds, sizes, strict=True)]
    found = torch.tensor([[1, *size] for size in sizes])
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": found}


def merge_sizes(config: Any, rows: Rows) -> Inputs:
    """As :func:`grids`, and by how much each picture is merged [N]."""
    found = grids(config, rows)
    return {**found, "image_merge_sizes": torch.full((len(found["image_grid_thw"]),), 2)}


def two_resolutions(config: Any, rows: Rows) -> Inputs:
    """As :func:`plain`, and again in more pixels."""
    size = config.high_res_vision_config.image_size
    pixels = [noise(seed + 100, 1, 3, size, size) for row in rows for seed in row]
    return {**plain(config, rows), "high_res_pixel_values": torch.cat(pixels)}


def strips(config: Any, rows: Rows) -> Inputs:
    """Patches side by side [1, 3, size, P · size], and each picture's height and width [N, 2]."""
    size = vision_of(config).patch_size
    seeds = [seed for row in rows for seed in row]
    sizes = [(4, 4 * (1 + seed % 2)) for seed in seeds]
    pixels = [noise(s, 1, 3, size, h * w * size) for s, (h, w) in zip(seeds, sizes, strict=True)]
    return {
        "pixel_values": torch.cat(pixels, dim=-1),
        "target_sizes": torch.tensor(sizes, dtype=torch.int32),
    }


def locals_and_whole(config: Any, rows: Rows) -> Inputs:
    """Whole pictures [N, 3, S, S], of odd seeds two tiles more, and how many each has [N]."""
    height, width = side(config)
    seeds = [seed for row in rows for seed in row]
    counts = [2 * (seed % 2) for seed in seeds]
    parts = [noise(s + 50, n, 3, height, width) for s, n in zip(seeds, counts, strict=True) if n]
    found = {**plain(config, rows), "num_local_patches": torch.tensor(counts)}
    return found if not parts else {**found, "pixel_values_local": torch.cat(parts)}


def time_patches(config: Any, rows: Rows) -> Inputs:
    """Patches one after another, channels last [P, time, size, size, 3]."""
    vision = vision_of(config)
    size = vision.patch_size
    seeds = [seed for row in rows for seed in row]
    pixels = [noise(s, 3 + s, vision.temporal_patch_size, size, size, 3) for s in seeds]
    return {"pixel_values": torch.cat(pixels)}


def tiles_and_mask(config: Any, rows: Rows) -> Inputs:
    """As :func:`tiles`, and which are not filled up [B, N]."""
    counts = torch.tensor([len(row) for row in rows])[:, None]
    found = tiles(config, rows)
    mask = torch.arange(found["pixel_values"].shape[1]) < counts
    return {**found, "pixel_attention_mask": mask}


def larger(config: Any, rows: Rows) -> Inputs:
    """As :func:`plain`, 64 pixels high and wide."""
    pixels = [noise(seed, 1, 3, 64, 64) for row in rows for seed in row]
    return {"pixel_values": torch.cat(pixels)}


def cross_attended(config: Any, rows: Rows) -> Inputs:
    """Four tiles of each picture of a row [B, N, 4, 3, S, S], odd seeds' last two empty."""
    height, width = side(config)
    most = max(map(len, rows))
    pixels = torch.zeros(len(rows), most, 4, 3, height, width)
    shapes = torch.zeros(len(rows), most, dtype=torch.int64)
    mask = torch.zeros(len(rows), most, 4, dtype=torch.int64)
    mask[:, :, 0] = 1
    for i, row in enumerate(rows):
        for j, seed in enumerate(row):
            count = 2 if seed % 2 else 4
            pixels[i, j, :count] = noise(seed, count, 3, height, width)
            shapes[i, j] = 2 if seed % 2 else 6
            mask[i, j, :count] = 1
    return {"pixel_values": pixels, "aspect_ratio_ids": shapes, "aspect_ratio_mask": mask}


def flat_patches(config: Any, rows: Rows) -> Inputs:
    """Patches one after another [P, 3 · size · size]."""
    width = 3 * config.patch_size**2
    pixels = [noise(seed, 4 + 2 * (seed % 2), width) for row in rows for seed in row]
    return {"pixel_values": torch.cat(pixels)}


BY_TYPE: dict[str, Callable[[Any, Rows], Inputs]] = {
    "aria": plain,
    "deepseek_ocr2": locals_and_whole,
    "deepseek_vl_hybrid": two_resolutions,
    "fast_vlm": larger,
    "fuyu": flat_patches,
    "gemma3n": larger,
    "granite_docling": tiles_and_mask,
    "inkling2": merged_patches,
    "inkling_mm_model": time_patches,
    "kimi_k25": square_patches,
    "lfm2_vl": spatial,
    "lighton_ocr": sized,
    "mistral3": sized,
    "mistral_large4": sized,
    "mllama": cross_attended,
    "paddleocr_vl": square_patches,
    "step3p7": locals_and_whole,
    "unlimited_ocr": locals_and_whole,
    "video_llama_3": merge_sizes,
}
