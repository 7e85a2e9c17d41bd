"""Prompts for tiny models: text that repeats itself, pictures between, ragged batches.

What a type's forward takes tells how its pictures are given, and its own vision features how many
tokens stand for each.

Shape letters: B rows, L prompt positions, N pictures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.models.odd_pictures import BY_TYPE, pinpoints, strips
from benchmarks.models.pictures import Inputs, Rows, grids, plain, positioned, tiles
from benchmarks.models.tiny import BOS, PAD

Row = list[int | str]  # ids of words, and pictures by their seeds
WORDS = [11, 12, 13, 14, 15, 11, 12, 13, 16, 17, 11, 12, 13]
TEXT: list[Row] = [
    [BOS, *WORDS],
    [BOS, 21, 22, 23, 21, 22, 23, 21],
    [BOS, *WORDS[3:], 18, *WORDS[3:]],
]
PICTURE: Row = [BOS, *WORDS[:8], "1", *WORDS[3:]]
PICTURES: Row = [BOS, *WORDS[:3], "2", 18, "3", *WORDS]
ROWS: list[Row] = [PICTURES, [BOS, *WORDS[5:], *WORDS[:4]], ["1", *WORDS[2:9]]]
EACH: list[Row] = [PICTURE, [BOS, "2", *WORDS[:5]], [BOS, 12, "3", *WORDS[2:9]]]
STARTS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
ENDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
PLACEHOLDERS = ("image_token_id", "image_token_index", "image_patch_id", "video_token_index")
SOME = 120  # the placeholder of types whose config names none
PIXELS = ("pixel_values", "flattened_patches", "protein_input_ids")
ONE_A_ROW = (
    "blip",
    "blip-2",
    "evolla",
    "git",
    "instructblip",
    "instructblipvideo",
    "kosmos-2",
    "kosmos-2.5",
)
EVERY_ROW = ("idefics", "mllama")  # rows without pictures are not mixed with others


def prompts_for(model: PreTrainedModel) -> dict[str, Inputs]:
    """Text, and a ragged batch of it; with pictures, where ``model`` takes them: one, two, and a
    batch whose second row has none if it may.
    """
    if not any(takes(model, name) for name in PIXELS):
        return text_prompts()
    made = Prompts(model)
    kind = model.config.model_type
    found = {"picture": made.of([PICTURE])}
    if model.config.is_encoder_decoder:
        return found | {"batch": made.of(EACH)}
    if kind not in (*ONE_A_ROW, "idefics"):
        found["text"] = text_prompts()["text"]
    if kind not in ONE_A_ROW:
        found["pictures"] = made.of([PICTURES])
    found["batch"] = made.of(EACH if kind in (*ONE_A_ROW, *EVERY_ROW) else ROWS)
    return found


def text_prompts() -> dict[str, Inputs]:
    """One row, and a batch of three of different lengths."""
    return {"text": left_padded(TEXT[:1]), "batch": left_padded(TEXT)}


def left_padded(rows: Sequence[Sequence[Any]]) -> Inputs:
    """``rows`` of ids as generate wants them."""
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the forward of ``model`` has an argument ``name``."""
    return name in inspect.signature(model.forward).parameters


def first_of(config: Any, names: Sequence[str]) -> int | None:
    """The first of the fields ``names`` that ``config`` holds."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)


class Prompts:
    """Prompts with pictures, of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: Any = model.config
        named = first_of(self.config, PLACEHOLDERS)
        self.image = SOME if named is None else named
        self.make = self._kind()

    def _kind(self) -> Callable[[Any, Rows], Inputs]:
        """How pictures are given."""
        if self.config.model_type in BY_TYPE:
            return BY_TYPE[self.config.model_type]
        if takes(self.model, "image_grid_thw"):
            return grids
        if takes(self.model, "image_position_ids"):
            return positioned
        if hasattr(self.config, "image_grid_pinpoints"):
            return pinpoints
        if takes(self.model, "target_sizes"):
            return strips
        if takes(self.model, "pixel_attention_mask") or takes(self.model, "pixel_mask"):
            return tiles
        return plain

    def of(self, rows: Sequence[Row]) -> Inputs:
        """Inputs of a batch of ``rows``."""
        seeds = [[int(part) for part in row if isinstance(part, str)] for row in rows]
        inputs = left_padded([self._ids(row) for row in rows])
        if any(seeds):
            inputs |= self.make(self.config, seeds)
        if takes(self.model, "bbox"):
            inputs["bbox"] = inputs["input_ids"][..., None].expand(-1, -1, 4)
        if not takes(self.model, "input_ids"):
            return {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
        return inputs | self._types(inputs)

    def _types(self, inputs: Inputs) -> Inputs:
        """What tells of each token whether it stands for a picture [B, L], by its several names."""
        pictures = (inputs["input_ids"] == self.image).int()
        found = {}
        for name in ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
            if takes(self.model, name):
                found[name] = pictures
        if self.config.model_type == "paligemma":  # what is answered is 1, all of the prompt 0
            found["token_type_ids"] = torch.zeros_like(pictures)
        if self.config.model_type in ("kosmos-2", "kosmos-2.5"):
            found["image_embeds_position_mask"] = pictures
        if "aspect_ratio_mask" in inputs:
            found["cross_attention_mask"] = self._attended(inputs)
        if takes(self.model, "image_attention_mask"):
            found["image_attention_mask"] = self._of_pictures(inputs)
        return found

    def _of_pictures(self, inputs: Inputs) -> Tensor:
        """Which pictures each token attends to: the one before it [B, L, N]."""
        ids: Tensor = inputs["input_ids"]
        before = (ids == self.image).cumsum(1)  # pictures so far
        pictures = torch.arange(1, inputs["pixel_values"].shape[1] + 1)
        return (before[..., None] == pictures).long()

    def _attended(self, inputs: Inputs) -> Tensor:
        """Which tiles each token attends to: those of the picture before it [B, L, N, 4]."""
        tiles_of: Tensor = inputs["aspect_ratio_mask"]
        return self._of_pictures(inputs)[..., None] * tiles_of[:, None]

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
        queries = first_of(self.config, ("num_query_tokens", "latent_query_num"))
        if queries is not None:
            return 4 * queries if self.config.model_type == "instructblipvideo" else queries
        whole: Any = self.model
        source = whole
        if not hasattr(source, "get_image_features"):
            source = getattr(whole, "model", whole)
        if not hasattr(source, "get_image_features"):  # pictures are attended to or put before
            return 0 if self.config.model_type in ("blip", "evolla", "git") else 1
        found = source.get_image_features(**self.make(self.config, [[seed]]))
        return tokens_of(found)


def tokens_of(found: Any) -> int:
    """How many tokens the vision features ``found`` are."""
    deep = getattr(found, "deepstack_features", None)
    if getattr(found, "pooler_output", None) is not None:
        features = found.pooler_output
    elif deep:  # pairs of a layer and what is added there
        features = deep[0][1]
    else:
        features = getattr(found, "last_hidden_state", found)
    parts = [features] if isinstance(features, Tensor) else list(features)
    return sum(part.numel() for part in parts) // parts[0].shape[-1]
