"""Janus and Janus-Pro (arXiv 2410.13848, 2501.17811) as models that draw pictures.

Picture tokens have a separate vocabulary, with its own head and embeddings. The unconditional
prompt has padding, which is attended to, in place of all but the first token and the token that
begins the picture.

Shape letters: B batch, T tokens of a picture, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.core.guidance import AllowedTokens
from specmm.hf.pictures.picture_tokens import (
    Decoder,
    Layout,
    Painting,
    PictureModel,
    Size,
    square,
    token_side,
    unit_codebook,
)


def _layout(model: Any, size: Size | None) -> Layout:
    vq = model.config.vq_config
    tokens = model.model.vision_model.config.num_image_tokens
    side = round(tokens**0.5) * token_side(model)
    codes = torch.ones(vq.num_embeddings, dtype=torch.bool)
    return square(tokens, size, side, AllowedTokens.everywhere(codes))


def _ids(model: Any, tokenizer: Any, text: str, layout: Layout) -> list[int]:
    """Ids of ``text`` in the chat template, if there is one, and of the token that begins a
    picture.

    Raises ``ValueError`` for a tokenizer without such a token.
    """
    begin = getattr(tokenizer, "boi_token", None)
    if begin is None:
        raise ValueError(
            "tokenizer must name the token that begins a picture (boi_token), got none; "
            "use the folder as Janus was published for transformers"
        )
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text + begin)["input_ids"])


def _unconditional(model: Any, tokenizer: Any, ids: Sequence[int]) -> list[int]:
    config = model.generation_config
    allowed = (config.bos_token_id, tokenizer.boi_token_id)
    return [token if token in allowed else config.pad_token_id for token in ids]


def _decode(model: Any, folder: Path) -> Decoder:
    def decoder(tokens: Tensor, layout: Layout, painting: Painting) -> Tensor:
        pixels: Tensor = model.decode_image_tokens(tokens)
        return pixels.permute(0, 3, 1, 2)

    return decoder


JANUS = PictureModel(
    architecture="JanusForConditionalGeneration",
    scores="generation_head.",
    head=lambda model: model.model.generation_head,
    embed=lambda model: model.prepare_embeddings_for_image_generation,
    layout=_layout,
    ids=_ids,
    away=_unconditional,
    decode=_decode,
    codebook=unit_codebook,
    cfg=5.0,
    shared=False,
)
