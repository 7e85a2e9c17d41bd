"""Emu3 (arXiv 2409.18869) as a model that draws pictures.

A prompt ends with the picture's height and width in tokens. Each row of picture tokens ends with an
end-of-line token; only that token is allowed there, so drafts of it are always right.

Shape letters: B batch, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.hf.pictures.picture_tokens import (
    Decoder,
    Layout,
    Painting,
    PictureModel,
    Size,
    lined,
    token_codes,
    token_side,
)

USUAL = (720, 720)  # as the released processor has it


def _layout(model: Any, size: Size | None) -> Layout:
    """The layout of a picture whose sides are multiples of the image tokenizer's factor."""
    factor = token_side(model)
    height, width = size or USUAL
    if height < factor or width < factor or height % factor or width % factor:
        raise ValueError(
            f"height and width must be multiples of {factor}, got {height} and {width}"
        )
    words = model.vocabulary_mapping
    pictures, line = torch.zeros(2, model.config.get_text_config().vocab_size, dtype=torch.bool)
    pictures[words.image_tokens] = True
    line[words.eol_token_id] = True
    return lined(height // factor, width // factor, pictures, line)


def _ids(model: Any, tokenizer: Any, text: str, layout: Layout) -> list[int]:
    size = f"{tokenizer.boi_token}{layout.rows}*{layout.columns}{tokenizer.image_wrapper_token}"
    return list(tokenizer(f"{tokenizer.bos_token}{text}{size}")["input_ids"])


def _codebook(model: Any) -> tuple[Tensor, Tensor]:
    ids, codes = token_codes(model)
    return ids, model.model.vqmodel.quantize.embedding.weight.detach()[codes]


def _decode(model: Any, folder: Path) -> Decoder:
    def decoder(tokens: Tensor, layout: Layout, painting: Painting) -> Tensor:
        lines = tokens.view(len(tokens), layout.rows, layout.columns + 1)
        codes = model.vocabulary_mapping.convert_bpe2img(lines)
        pixels: Tensor = model.model.vqmodel.decode(codes)
        return pixels.flatten(0, -4)

    return decoder


EMU3 = PictureModel(
    architecture="Emu3ForConditionalGeneration",
    layout=_layout,
    ids=_ids,
    decode=_decode,
    codebook=_codebook,
    cfg=3.0,
)
