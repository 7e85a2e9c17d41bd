"""Chameleon (arXiv 2405.09818) as a model that draws pictures.

The class of transformers has its image tokenizer's encoder only. Pixels need a decoder: the
tokenizer as a ``diffusers.VQModel`` in the model's folder, under ``vq/``.

Shape letters: B batch, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.guidance import AllowedTokens
from specmm.hf.picture_tokens import (
    Decoder,
    Encoder,
    Layout,
    Painting,
    PictureModel,
    Size,
    pixels_of,
    square,
)

BEGIN = "<racm3:break>"  # of a picture


def _layout(model: PreTrainedModel, size: Size | None) -> Layout:
    """Squares of picture tokens alone."""
    mask = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    mask[_codes(model)[0]] = True
    vq = model.config.vq_config
    side = vq.resolution // 2 ** (len(vq.channel_multiplier) - 1)
    return square(side**2, size, vq.resolution, AllowedTokens.everywhere(mask))


def _codes(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Ids of the picture tokens, in order, and their codes."""
    ids, codes = zip(*sorted(model.model.vocabulary_mapping.bpe2img.items()), strict=True)
    return torch.tensor(ids), torch.tensor(codes)


def _codebook(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    rows = model.model.vqmodel.quantize.embedding.weight.detach()
    ids, codes = (table.to(rows.device) for table in _codes(model))
    return ids, rows[codes]


def _ids(model: PreTrainedModel, tokenizer: Any, text: str, layout: Layout) -> list[int]:
    return [*tokenizer(text)["input_ids"], model.config.vocabulary_map[BEGIN]]


def _encode(model: Any, layout: Layout) -> tuple[Size, Encoder]:
    def encoder(pixels: Tensor) -> Tensor:
        codes = model.model.vqmodel.encode(pixels).image_tokens.view(len(pixels), -1)
        return model.model.vocabulary_mapping.convert_img2bpe(codes).long()

    return pixels_of(model, layout), encoder


def _decode(model: PreTrainedModel, folder: Path) -> Decoder:
    """The tokenizer in ``vq/``; raises ``ValueError`` where there is none."""
    from diffusers import VQModel

    if not (folder / "vq" / "config.json").is_file():
        raise ValueError(
            f"{folder} has no decoder for pictures: put the tokenizer as a diffusers VQModel into "
            f"{folder / 'vq'}, or give output_type='latent' for tokens alone"
        )
    vq = VQModel.from_pretrained(folder / "vq", low_cpu_mem_usage=False).to(model.device).eval()
    ids, codes = (table.to(model.device) for table in _codes(model))

    def decoder(tokens: Tensor, layout: Layout, painting: Painting) -> Tensor:
        places = torch.searchsorted(ids, tokens)
        found = codes[places].view(len(tokens), layout.rows, layout.columns)
        latents = vq.quantize.embedding(found).permute(0, 3, 1, 2)
        return vq.decode(latents, force_not_quantize=True).sample

    return decoder


CHAMELEON = PictureModel(
    architecture="ChameleonForConditionalGeneration",
    layout=_layout,
    ids=_ids,
    decode=_decode,
    codebook=_codebook,
    encode=_encode,
    cfg=3.0,
)
