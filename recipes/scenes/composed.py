"""Scenes and conversations as a model of two packages' parts takes them
(:mod:`specmm.vlm.loading`).

Shape letters: B pictures, R pixels a side.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from recipes.scenes.packing import Encoder, Marks, to_pixels
from recipes.scenes.tokenizer import MEAN as SCENE_MEAN
from recipes.scenes.tokenizer import STD as SCENE_STD
from specmm.vlm.loading import IMAGE, MEAN, STD

MARKS = Marks(
    opening="<|im_start|>user\n",
    again="\n<|im_start|>user\n",
    reply="<|im_end|>\n<|im_start|>assistant\n",
    end="<|im_end|>",
    image=IMAGE,
)


def encoder(model: Any, tokenizer: Any) -> Encoder:
    """What turns conversations about scenes into rows for such a model."""
    side = model.config.vision_config.image_size
    return Encoder(
        tokenizer,
        model.config.image_seq_length,
        MARKS,
        lambda image: prepared(to_pixels(image)[None], side)[0],
    )


def prepared(scenes: Tensor, side: int) -> Tensor:
    """Scenes as a small LLaVA is trained on, [B, 3, R, R], as the tower sees them, [B, 3, ``side``,
    ``side``].
    """
    pixels = scenes * SCENE_STD + SCENE_MEAN
    larger = F.interpolate(pixels, (side, side), mode="bicubic", antialias=True).clamp(
        0, 1
    )  # as PIL resizes
    return (larger - MEAN) / STD
