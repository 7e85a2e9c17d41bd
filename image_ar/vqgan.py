"""VQGAN's decoder from codes to pixels, as published for Chameleon's image tokenizer.

transformers' Chameleon lacks it. The weights are in the image tokenizer's own file, which
Chameleon, Anole and Lumina-mGPT share, or among the weights of a converted model.

Source: VQGAN (arXiv 2012.09841). Shape letters: B batch, h rows, w columns, E code width.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from specmm.hf.drafters.drafter_formats import ModelFolder
from specmm.image_ar.autoencoder import AttnBlock, Decoder, Stack
from specmm.loading.checkpoints import PICKLED, State, load_strict, read_checkpoint

FILE = "vqgan.ckpt"
DIFFUSERS = "vq"  # the folder of a tokenizer in diffusers' layout
PLACES = ("", "vq", "tokenizer")  # folders that may hold the file, below a model's
OWN = "model.vqmodel."  # how a conversion's names begin
NEEDED = ("decoder.", "post_quant_conv.", "quantize.embedding.")


class VQGANDecoder(nn.Module):
    """Code grids [B, h, w] to pictures [B, 3, H, W] in about [-1, 1], by a ``vq_config``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        levels = range(len(config.channel_multiplier))
        attends = config.attn_resolutions or ()
        stack = Stack(
            ch=config.base_channels,
            ch_mult=tuple(config.channel_multiplier),
            blocks=config.num_res_blocks + 1,
            latent=config.latent_channels,
            attending=[i for i in levels if config.resolution // 2**i in attends],
            kind=AttnBlock if config.attn_type == "vanilla" else nn.Identity,
        )
        book = nn.Embedding(config.num_embeddings, config.embed_dim)
        self.quantize = nn.ModuleDict({"embedding": book})
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        self.decoder = Decoder(stack)

    def forward(self, codes: Tensor) -> Tensor:
        """The pictures of ``codes`` [B, h, w]."""
        vectors: Tensor = self.quantize["embedding"](codes)  # [B, h, w, E]
        pictures: Tensor = self.decoder(self.post_quant_conv(vectors.permute(0, 3, 1, 2)))
        return pictures


def decoder_of(folder: Path, config: Any) -> VQGANDecoder | None:
    """The decoder in or beside the model in ``folder``, sized by its ``vq_config``, or None.

    Raises ``ValueError`` for a file that does not fit the config.
    """
    file = _published(folder)
    state = read_checkpoint(file) if file else _own_weights(folder)
    if not any(name.startswith(NEEDED[0]) for name in state):
        return None
    decoder = VQGANDecoder(config)
    needed = {name: weight for name, weight in state.items() if name.startswith(NEEDED)}
    load_strict(decoder, needed, source=file or folder)
    return decoder.eval()


def fill_tokenizer(vqmodel: nn.Module, folder: Path) -> bool:
    """Load the weights published beside the model in ``folder`` into its ``vqmodel``, which was
    saved without weights. Returns whether any are there.
    """
    file = _published(folder)
    if file is not None:
        names = vqmodel.state_dict()
        state = {name: x for name, x in read_checkpoint(file).items() if name in names}
        load_strict(vqmodel, state, source=file)
    return file is not None


def keep_decoder(folder: Path, into: Path) -> None:
    """Copy the decoder beside the model of ``folder``, if any, ``into`` another folder. Decoder
    weights inside the model's own files, which transformers would drop, get a separate file.
    """
    if (folder / DIFFUSERS).is_dir():
        shutil.copytree(folder / DIFFUSERS, into / DIFFUSERS, dirs_exist_ok=True)
    elif file := _published(folder):
        shutil.copyfile(file, into / FILE)
    else:
        state = _own_weights(folder)
        if any(name.startswith(NEEDED[0]) for name in state):
            torch.save({"state_dict": state}, into / FILE)


def _published(folder: Path) -> Path | None:
    """The tokenizer's own file beside or in ``folder``."""
    files = (folder / place / FILE for place in PLACES)
    return next((file for file in files if file.is_file()), None)


def _own_weights(folder: Path) -> State:
    """The tokenizer's weights among the model's files, by their names in the tokenizer."""
    weights: State = {}
    for file in ModelFolder(folder).files:
        if file.suffix in PICKLED:
            continue
        with safe_open(file, "pt") as opened:
            names = [name for name in opened.keys() if name.startswith(OWN)]  # noqa: SIM118
            weights |= {name.removeprefix(OWN): opened.get_tensor(name) for name in names}
    return weights
