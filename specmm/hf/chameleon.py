"""Chameleon (arXiv 2405.09818) as a model that draws pictures.

The class of transformers has its image tokenizer's encoder only. Pixels need a decoder: the
tokenizer as a ``diffusers.VQModel`` in the model's folder, under ``vq/``.

Shape letters: B batch, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.guidance import AllowedTokens
from specmm.hf.picture_tokens import Decoder, PictureModel

BEGIN = "<racm3:break>"  # of a picture


def _allowed(model: PreTrainedModel) -> AllowedTokens:
    """Picture tokens alone."""
    mask = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    mask[_codes(model)[0]] = True
    return AllowedTokens.everywhere(mask)


def _codes(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Ids of the picture tokens, in order, and their codes."""
    ids, codes = zip(*sorted(model.model.vocabulary_mapping.bpe2img.items()), strict=True)
    return torch.tensor(ids), torch.tensor(codes)


def _grid(model: PreTrainedModel) -> int:
    vq = model.config.vq_config
    return vq.resolution // 2 ** (len(vq.channel_multiplier) - 1)


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
    side = _grid(model)

    def decoder(tokens: Tensor) -> Tensor:
        found = codes[torch.searchsorted(ids, tokens)].view(len(tokens), side, side)
        latents = vq.quantize.embedding(found).permute(0, 3, 1, 2)
        return vq.decode(latents, force_not_quantize=True).sample

    return decoder


CHAMELEON = PictureModel(
    architecture="ChameleonForConditionalGeneration",
    head=lambda model: model.lm_head,
    embed=lambda model: model.get_input_embeddings(),
    allowed=_allowed,
    decode=_decode,
    grid=_grid,
    begin=lambda model: [model.config.vocabulary_map[BEGIN]],
    cfg=3.0,
)
