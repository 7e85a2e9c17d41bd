"""Chameleon (arXiv 2405.09818), Anole (2407.06135) and Lumina-mGPT (2408.02657) as models that draw
pictures.

All are one transformers class. Chameleon and Anole draw squares of picture tokens after the
prompt's end of turn. Lumina-mGPT, recognised by its config, has its own prompt sentence, reads the
picture's size as two tokens and ends every row with a token.

The class has only the encoder of its image tokenizer. Pixels need a decoder: the published
``vqgan.ckpt``, or the tokenizer as a ``diffusers.VQModel`` under ``vq/``.

Shape letters: B batch, T tokens of a picture, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specmm.core.guidance import AllowedTokens
from specmm.extending.registry import named
from specmm.hf.pictures.diffusers_parts import load_part
from specmm.hf.pictures.picture_tokens import (
    Decoder,
    Layout,
    Painting,
    PictureModel,
    Size,
    lined,
    square,
    token_codes,
    token_side,
)

START = "<s>"
BEGIN = "<racm3:break>"  # before a picture
END = "<eoss>"  # after a picture among words
END_OF_TURN = "<reserved08706>"
END_OF_LINE = "<reserved08799>"  # Lumina-mGPT's
SIDE = "<reserved{:05d}>"  # Lumina-mGPT's, with so many cells more than this
SIDES_FROM = 8800
CELL = 2  # tokens of a cell's sides, by which Lumina-mGPT counts sizes
MOST = 200  # names of such tokens, in Chameleon's vocabulary
RATIO = 4  # the largest ratio of sides in Lumina-mGPT's pictures
USUAL = 24  # cells of a side, as Lumina-mGPT's examples have, or as many as there are tokens for
ASKED = "Generate an image of {}x{} according to the following prompt:\n{}"
MASKED = "mask_image_logits"
LUMINA = (MASKED, "z_loss_weight")  # settings of its training
VQGAN = "specmm.image_ar.vqgan:decoder_of"
TOKENIZER = "specmm.image_ar.vqgan:fill_tokenizer"
KEEP = "specmm.image_ar.vqgan:keep_decoder"


def _lined(model: PreTrainedModel) -> bool:
    """Whether ``model`` is a Lumina-mGPT."""
    return any(hasattr(model.config, name) for name in LUMINA)


def _layout(model: PreTrainedModel, size: Size | None) -> Layout:
    """The layout of Chameleon's squares, or of any size for which Lumina-mGPT has tokens."""
    mask = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    mask[token_codes(model)[0].cpu()] = True
    factor = token_side(model)
    if not _lined(model):
        side = model.config.vq_config.resolution
        return square((side // factor) ** 2, size, side, AllowedTokens.everywhere(mask))
    cell = CELL * factor
    words = model.config.vocabulary_map
    numbers = [n for n in range(1, MOST) if SIDE.format(SIDES_FROM + n) in words]
    usual = max((n for n in numbers if n <= USUAL), default=USUAL) * cell
    height, width = size or (usual, usual)
    valid = all(side % cell == 0 and side // cell in numbers for side in (height, width))
    if not valid or max(height, width) > RATIO * min(height, width):
        raise ValueError(
            f"height and width must be multiples of {cell} that the model has tokens for, and "
            f"neither more than {RATIO} times the other, got {height} and {width}"
        )
    line = torch.zeros_like(mask)
    line[words[END_OF_LINE]] = True
    return lined(height // factor, width // factor, mask, line)


def _codebook(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    ids, codes = token_codes(model)
    vq = model.model.vqmodel
    return ids, None if vq is None else vq.quantize.embedding.weight.detach()[codes]


def _ids(model: PreTrainedModel, tokenizer: Any, text: str, layout: Layout) -> list[int]:
    """Ids of ``text`` as a turn, and of the tokens that begin a picture."""
    words = model.config.vocabulary_map
    begin = [words[BEGIN]]
    if _lined(model):
        rows, columns = (count // CELL for count in (layout.rows, layout.columns))
        cell = CELL * token_side(model)
        text = ASKED.format(columns * cell, rows * cell, text)
        begin += [words[SIDE.format(SIDES_FROM + cells)] for cells in (rows, columns)]
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    turn = [words[name] for name in (END_OF_TURN,) if name in words]
    return [words[START], *token_ids, *turn, *begin]


def _unconditional(model: PreTrainedModel, tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The unconditional prompt: Chameleon's start-of-text token, then a picture's first tokens."""
    words = model.config.vocabulary_map
    begin = list(ids).index(words[BEGIN])
    return list(ids[begin:]) if _lined(model) else [words[START], *ids[begin:]]


def _check(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` for a model whose pictures were masked in training."""
    pictures = model.model.vocabulary_mapping.image_tokens
    rows = model.lm_head.weight[pictures[:2]]
    reason = ""
    if not pictures:
        reason = "its vocabulary has none"
    elif getattr(model.config, MASKED, False):
        reason = f"its config has {MASKED}"
    elif not bool(rows.isfinite().all()) or torch.equal(rows[0], rows[-1]):
        reason = "its head scores all of them alike"
    if reason:
        raise ValueError(
            f"the model must have learned to draw picture tokens, but {reason}; use one trained "
            "for it, such as Anole or Lumina-mGPT"
        )


def _marks(model: PreTrainedModel) -> tuple[int, int]:
    """The ids that begin and end a picture; ``ValueError`` for a model that cannot draw in text."""
    _check(model)
    if _lined(model):
        raise ValueError(
            "draw=True serves Chameleon and Anole, got Lumina-mGPT, which draws alone; use "
            "ImagePipeline"
        )
    words = model.config.vocabulary_map
    if END not in words:
        raise ValueError(f"the model's vocabulary_map must name {END}, which ends a picture")
    return words[BEGIN], words[END]


def _fill(model: PreTrainedModel, folder: Path) -> None:
    """Load the image tokenizer from ``folder``, or remove it from ``model`` if the folder has none
    (as after Lumina-mGPT's training): random weights would give wrong codes and pictures.
    """
    if not named(TOKENIZER)(model.model.vqmodel, folder):
        model.model.vqmodel = None


def _sampling(model: PreTrainedModel) -> dict[str, Any]:
    """The sampling settings of the releases."""
    if not _lined(model):
        return {"temperature": 0.7, "top_p": 0.9}
    return {"cfg": 4.0, "top_k": min(2000, model.config.vocab_size)}


def _decode(model: PreTrainedModel, folder: Path) -> Decoder:
    """The image tokenizer's decoder; raises ``ValueError`` if there is none."""
    pictures_of = _pictures_of(model, folder)
    ids, codes = token_codes(model)

    def decoder(tokens: Tensor, layout: Layout, painting: Painting) -> Tensor:
        grid = tokens.view(len(tokens), layout.rows, -1)[..., : layout.columns]
        return pictures_of(codes[torch.searchsorted(ids, grid.contiguous())])

    return decoder


def _pictures_of(model: PreTrainedModel, folder: Path) -> Callable[[Tensor], Tensor]:
    """The function from codes [B, rows, columns] to pictures; ``ValueError`` without a decoder."""
    from diffusers import VQModel

    if (folder / "vq" / "config.json").is_file():
        vq = load_part(VQModel, folder / "vq", low_cpu_mem_usage=False).to(model.device).eval()

        def pictures(codes: Tensor) -> Tensor:
            latents = vq.quantize.embedding(codes).permute(0, 3, 1, 2)
            return vq.decode(latents, force_not_quantize=True).sample

        return pictures
    vqgan = named(VQGAN)(folder, model.config.vq_config)
    if vqgan is None:
        raise ValueError(
            f"{folder} has no decoder for pictures: put Chameleon's vqgan.ckpt into it, or the "
            f"tokenizer as a diffusers VQModel into {folder / 'vq'}, or give "
            "output_type='latent' for tokens alone"
        )
    opened: Callable[[Tensor], Tensor] = vqgan.to(model.device)
    return opened


CHAMELEON = PictureModel(
    architecture="ChameleonForConditionalGeneration",
    layout=_layout,
    ids=_ids,
    away=_unconditional,
    decode=_decode,
    codebook=_codebook,
    check=_check,
    fill=_fill,
    keep=lambda folder, into: named(KEEP)(folder, into),
    sampling=_sampling,
    unneeded="model.vqmodel.",
    cfg=3.0,
    marks=_marks,
)
