"""GLM-Image as a model that draws pictures.

Tokens are drawn in two grids, first a small preview and then the picture, with positions by row and
column (M-RoPE). The diffusion part of diffusers' ``GlmImagePipeline`` turns them into pixels.
Picture tokens have the first ids of the vocabulary, in the head and in the embeddings. The
autoregressive part has no guidance.

Shape letters: T tokens of both grids.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5EncoderModel

from specmm import zoo
from specmm.core.guidance import AllowedTokens
from specmm.hf.loading.pretrained import load_model
from specmm.hf.pictures.diffusers_parts import load_part, unreadable
from specmm.hf.pictures.picture_tokens import (
    Decoder,
    Layout,
    Painting,
    PictureModel,
    Size,
    own_sampling,
    unit_codebook,
)

USUAL = (1152, 768)  # pixels, as GlmImageProcessor has them
SIDE = 32  # pixels of a token's sides
PARTS = ("vision_language_encoder", "processor")  # of model and tokenizer
PREVIEW = 16  # tokens of the preview's sides where it is square
Grid = tuple[int, int]
"""Rows and columns."""


def _layout(model: Any, size: Size | None) -> Layout:
    """The layout of a picture of whole tokens whose preview has at least one token."""
    height, width = size or USUAL
    valid = height >= SIDE and width >= SIDE and not (height % SIDE or width % SIDE)
    picture = (height // SIDE, width // SIDE)
    preview = _preview(picture) if valid else (0, 0)
    if not min(preview):
        raise ValueError(
            f"height and width must be multiples of {SIDE}, and neither more than {PREVIEW**2} "
            f"times the other, got {height} and {width}"
        )
    mask = torch.zeros(model.config.get_text_config().vision_vocab_size, dtype=torch.bool)
    mask[: model.config.vq_config.num_embeddings] = True
    places = _places([preview, picture])
    allowed = AllowedTokens.everywhere(mask)
    return Layout(*picture, places.shape[1], allowed, places)


def _preview(picture: Grid) -> Grid:
    """The preview's grid, drawn before the ``picture`` and of about its shape."""
    ratio = picture[0] / picture[1]
    return int(ratio**0.5 * PREVIEW), int((1 / ratio) ** 0.5 * PREVIEW)


def _places(grids: list[Grid]) -> Tensor:
    """Positions [3, T] in time, by row and by column, counted from where the first grid begins."""
    parts = []
    start = 0
    for rows, columns in grids:
        row = torch.arange(rows).repeat_interleave(columns)
        column = torch.arange(columns).repeat(rows)
        parts.append(torch.stack([torch.zeros_like(row), row, column]) + start)
        start += max(rows, columns)
    return torch.cat(parts, dim=1)


def _ids(model: Any, tokenizer: Any, text: str, layout: Layout) -> list[int]:
    """Ids of the chat template with ``text``, both grids' sizes and the token that begins pictures.

    Raises ``ValueError`` for a tokenizer without the tokens that enclose sizes.
    """
    opens, closes = (getattr(tokenizer, f"grid_{end}_token", None) for end in ("bos", "eos"))
    if opens is None or closes is None:
        raise ValueError(
            "tokenizer must name the tokens around a picture's size (grid_bos_token and "
            "grid_eos_token), got none; use the processor's folder of the published GLM-Image"
        )
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False)
    picture = (layout.rows, layout.columns)
    sizes = "".join(f"{opens}{h} {w}{closes}" for h, w in (picture, _preview(picture)))
    return list(tokenizer(f"{text}{sizes}{tokenizer.bos_token}")["input_ids"])


def _sampling(model: Any) -> dict[str, Any]:
    """Sampling settings of the model's own generate, which diffusers calls."""
    settings = own_sampling(model, samples=True)
    width = int(model.config.get_text_config().vision_vocab_size)
    return {**settings, "top_k": min(settings["top_k"], width)}


def _decode(model: Any, folder: Path) -> Decoder:
    """The diffusion part of the pipeline in ``folder``; ``ValueError`` if there is none."""
    if not (folder / zoo.PIPELINE).is_file():
        raise ValueError(
            f"{folder} has no diffusion part: give the folder of the GlmImagePipeline, or "
            "output_type='latent' for tokens alone"
        )
    pipe = _painter(folder, model.dtype).to(model.device)
    pipe.set_progress_bar_config(disable=True)

    def decoder(tokens: Tensor, layout: Layout, painting: Painting) -> Tensor:
        drawn = tokens[:, -layout.rows * layout.columns :]
        fine = [pipe._upsample_token_ids(row, layout.rows, layout.columns) for row in drawn]
        pixels: Tensor = pipe(
            prompt=[painting.text],
            height=layout.rows * SIDE,
            width=layout.columns * SIDE,
            prior_token_ids=torch.cat(fine),
            generator=painting.generator,
            output_type="pt",
            **painting.options,
        ).images
        return 2 * pixels - 1

    return decoder


def _painter(folder: Path, dtype: torch.dtype) -> Any:
    """The diffusers pipeline in ``folder`` without the model that draws tokens.

    Raises ``ValueError`` for files that are damaged and weights that are missing.
    """
    from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel

    options = {
        "text_encoder": load_model(T5EncoderModel, folder / "text_encoder", dtype=dtype),
        "transformer": load_part(
            GlmImageTransformer2DModel, folder / "transformer", torch_dtype=dtype
        ),
        "vae": load_part(AutoencoderKL, folder / "vae", torch_dtype=dtype),
    }
    try:
        return GlmImagePipeline.from_pretrained(folder, **{PARTS[0]: None}, **options)
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error


def _keep(folder: Path, into: Path) -> None:
    """Copy a pipeline's folder except the model that draws tokens, which is saved separately."""
    if not (folder / zoo.PIPELINE).is_file():
        return
    shutil.copyfile(folder / zoo.PIPELINE, into / zoo.PIPELINE)
    for part in folder.iterdir():
        if part.is_dir() and part.name not in (PARTS[0], "drafters"):
            shutil.copytree(part, into / part.name, dirs_exist_ok=True)


GLM_IMAGE = PictureModel(
    architecture="GlmImageForConditionalGeneration",
    parts=PARTS,
    layout=_layout,
    ids=_ids,
    decode=_decode,
    keep=_keep,
    codebook=unit_codebook,
    sampling=_sampling,
    paints=True,
    shared=False,
)
