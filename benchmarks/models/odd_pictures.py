"""What the vision towers of single types take, as their processors give it.

Shape letters: N pictures, B rows, L prompt positions, P patches, S side of a picture in pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models.pictures import (
    Inputs,
    Rows,
    grids,
    in_order,
    noise,
    plain,
    side,
    tiles,
    vision_of,
)


def sized(config: Any, rows: Rows) -> Inputs:
    """Pictures of several widths, filled up [N, 3, S, S], and the size of each [N, 2]."""
    height, width = side(config)
    seeds = in_order(rows)
    sizes = [(height, width if seed % 2 else width // 2) for seed in seeds]
    pixels = torch.zeros(len(seeds), 3, height, width)
    for i, (seed, (high, wide)) in enumerate(zip(seeds, sizes, strict=True)):
        pixels[i, :, :high, :wide] = noise(seed, 3, high, wide)
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def pinpoints(config: Any, rows: Rows) -> Inputs:
    """Two tiles and the whole picture, for each [N, 3, 3, S, S], and the size of each [N, 2]."""
    height, width = side(config)
    seeds = in_order(rows)
    sizes = [(height, 2 * width) if seed % 2 else (2 * height, width) for seed in seeds]
    pixels = torch.stack([noise(seed, 3, 3, height, width) for seed in seeds])
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def spatial(config: Any, rows: Rows) -> Inputs:
    """Patches by picture, filled up [N, P, 3 · size · size], their mask, and heights and widths."""
    seeds = in_order(rows)
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
    seeds = in_order(rows)
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
    pixels = [noise(seed + 100, 1, 3, size, size) for seed in in_order(rows)]
    return {**plain(config, rows), "high_res_pixel_values": torch.cat(pixels)}


def strips(config: Any, rows: Rows) -> Inputs:
    """Patches side by side [1, 3, size, P · size], and each picture's height and width [N, 2]."""
    size = vision_of(config).patch_size
    seeds = in_order(rows)
    sizes = [(4, 4 * (1 + seed % 2)) for seed in seeds]
    pixels = [noise(s, 1, 3, size, h * w * size) for s, (h, w) in zip(seeds, sizes, strict=True)]
    return {
        "pixel_values": torch.cat(pixels, dim=-1),
        "target_sizes": torch.tensor(sizes, dtype=torch.int32),
    }


def locals_and_whole(config: Any, rows: Rows) -> Inputs:
    """Whole pictures [N, 3, S, S], of odd seeds two tiles more, and how many each has [N]."""
    height, width = side(config)
    seeds = in_order(rows)
    counts = [2 * (seed % 2) for seed in seeds]
    parts = [noise(s + 50, n, 3, height, width) for s, n in zip(seeds, counts, strict=True) if n]
    found = {**plain(config, rows), "num_local_patches": torch.tensor(counts)}
    return found if not parts else {**found, "pixel_values_local": torch.cat(parts)}


def time_patches(config: Any, rows: Rows) -> Inputs:
    """Patches one after another, channels last [P, time, size, size, 3]."""
    vision = vision_of(config)
    size = vision.patch_size
    seeds = in_order(rows)
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
    pixels = [noise(seed, 1, 3, 64, 64) for seed in in_order(rows)]
    return {"pixel_values": torch.cat(pixels)}


def larger_tiles(config: Any, rows: Rows) -> Inputs:
    """Of each picture a row of one tile [N, 1, 3, 64, 64]."""
    return {"pixel_values": larger(config, rows)["pixel_values"][:, None]}


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


def by_channel(config: Any, rows: Rows) -> Inputs:
    """All patches in one row [1, P, 3 · size · size]."""
    width = 3 * config.patch_size**2
    return {"pixel_values": torch.cat([noise(s, 1, 4 + s, width) for s in in_order(rows)], dim=1)}


def merged_positions(config: Any, rows: Rows) -> Inputs:
    """As :func:`positioned`, of patches that are merged already."""
    vision = vision_of(config)
    size = 3 * (vision.patch_size * vision.pooling_kernel_size) ** 2
    seeds = in_order(rows)
    pixels = torch.zeros(len(seeds), 6, size)
    places = torch.full((len(seeds), 6, 2), -1)
    for i, seed in enumerate(seeds):
        wide = 1 + seed % 3
        pixels[i, : 2 * wide] = noise(seed, 2 * wide, size).sigmoid()
        where = torch.cartesian_prod(torch.arange(2), torch.arange(wide)).flip(-1)
        places[i, : 2 * wide] = where
    return {"pixel_values": pixels, "image_position_ids": places}


def locals_and_grid(config: Any, rows: Rows) -> Inputs:
    """As :func:`locals_and_whole`, and columns and rows of the tiles [N, 2]."""
    found = locals_and_whole(config, rows)
    counts = found["num_local_patches"]
    grid = torch.stack([counts.clamp(min=1), counts.clamp(max=1)], dim=-1)
    return {**found, "num_local_patches": counts.tolist(), "patches_grid": grid}


def indexed_patches(config: Any, rows: Rows) -> Inputs:
    """Row, column and patch [N, P, 2 + width], rows and columns from 1."""
    width = vision_of(config).patch_embed_hidden_size
    place = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).float()
    parts = [torch.cat([place, noise(seed, 9, width)], dim=-1) for seed in in_order(rows)]
    return {"flattened_patches": torch.stack(parts)}


def pooled_patches(config: Any, rows: Rows) -> Inputs:
    """One crop a picture [N, P, 3 · size · size]; the patches of each token, and how many."""
    seeds = in_order(rows)
    width = 3 * vision_of(config).patch_size ** 2
    corner = torch.tensor([[0, 1, 4, 5]]) + torch.tensor([0, 2, 8, 10])[:, None]  # of 4 by 4
    pools = [corner + 16 * i for i in range(len(seeds))]
    return {
        "pixel_values": torch.stack([noise(seed, 16, width) for seed in seeds]),
        "image_token_pooling": torch.cat(pools),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * len(seeds)),
        "image_num_crops": torch.ones(len(seeds), dtype=torch.int64),
    }


def grids_of_two(config: Any, rows: Rows) -> Inputs:
    """As :func:`grids`, without time."""
    found = grids(config, rows)
    return {"pixel_values": found["pixel_values"], "image_grid_hw": found["image_grid_thw"][:, 1:]}


def questions(config: Any, rows: Rows) -> Inputs:
    """As :func:`plain`, and what the query tokens are told [N, 4]."""
    seeds = in_order(rows)
    ids = torch.tensor([[11, 12, 13, 14]] * len(seeds))
    told = {"qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)}
    return {**plain(config, rows), **told}


def questions_of_videos(config: Any, rows: Rows) -> Inputs:
    """Four frames of each video [N, 4, 3, S, S], and what the query tokens are told of each."""
    seeds = in_order(rows)
    frames = [[4 * seed + i for i in range(4)] for seed in seeds]
    pixels = plain(config, frames)["pixel_values"].unflatten(0, (len(seeds), 4))
    return {**questions(config, rows), "pixel_values": pixels}


def proteins(config: Any, rows: Rows) -> Inputs:
    """Chains of amino acids, one a row, filled up [B, L], and which positions are no filler."""
    encoder = config.protein_encoder_config
    lengths = torch.tensor([8 + 3 * seed for seed in in_order(rows)])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = 5 + torch.arange(mask.numel()).view_as(mask) % (encoder.vocab_size - 5)
    return {
        "protein_input_ids": ids.masked_fill(~mask, encoder.pad_token_id),
        "protein_attention_mask": mask.long(),
    }


BY_TYPE: dict[str, Callable[[Any, Rows], Inputs]] = {
    "aria": plain,
    "deepseek_ocr2": locals_and_whole,
    "deepseek_vl_hybrid": two_resolutions,
    "emu3": sized,
    "evolla": proteins,
    "fast_vlm": larger,
    "fuyu": by_channel,
    "gemma3n": larger,
    "gemma4_unified": merged_positions,
    "granite_docling": tiles_and_mask,
    "idefics": tiles,
    "inkling2": merged_patches,
    "inkling_mm_model": time_patches,
    "instructblip": questions,
    "instructblipvideo": questions_of_videos,
    "kimi_k25": square_patches,
    "kosmos-2.5": indexed_patches,
    "lfm2_vl": spatial,
    "lighton_ocr": sized,
    "mistral3": sized,
    "mistral_large4": sized,
    "mllama": cross_attended,
    "molmo2": pooled_patches,
    "nemotron_h_omni": grids_of_two,
    "paddleocr_vl": square_patches,
    "pix2struct": indexed_patches,
    "perception_lm": larger_tiles,
    "step3p7": locals_and_whole,
    "unlimited_ocr": locals_and_grid,
    "video_llama_3": merge_sizes,
}
