"""The picture tokenizer inside a Janus, trained as that of a LlamaGen is.

transformers' ``JanusVQVAE`` quantises without normalising and normalises when it decodes; with rows
of unit length, as they are stored in the end, both choose the same code.

Shape letters: B pictures, E width of a code, h latent side, R pixels a side, T = h² tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE

from specmm.image_ar.autoencoder import VectorQuantizer, VQCodes, VQConfig

WIDTH = 8  # E
LEVELS = (1, 1, 1, 4)  # most of the decoder is where there are few positions
CHANNELS = 32


def vq_config(codes: int, side: int, dim: int) -> JanusVQVAEConfig:
    """Of a tokenizer of ``side`` × ``side`` tokens for a language model of width ``dim``."""
    return JanusVQVAEConfig(
        embed_dim=WIDTH,
        num_embeddings=codes,
        latent_channels=64,
        base_channels=CHANNELS,
        channel_multiplier=list(LEVELS),
        num_res_blocks=0,
        num_patches=side,
        projection_dim=dim,
        image_token_embed_dim=dim,
    )


class JanusCodes(nn.Module):
    """A ``JanusVQVAE`` with the parts and methods of our own tokenizers, as a training wants it."""

    def __init__(self, config: JanusVQVAEConfig) -> None:
        super().__init__()
        self.vq = JanusVQVAE(config)
        self.quantize = VectorQuantizer(VQConfig(config.num_embeddings, config.embed_dim))
        self.quantize.embedding = self.vq.quantize.embedding

    @property
    def encoder(self) -> nn.Module:
        """Pictures [B, 3, R, R] to features."""
        return self.vq.encoder

    @property
    def quant_conv(self) -> nn.Module:
        """Features to [B, E, h, h]."""
        return self.vq.quant_conv

    def encode(self, images: Tensor) -> VQCodes:
        """Quantise pictures [B, 3, R, R] in [-1, 1]."""
        found: VQCodes = self.quantize(self.quant_conv(self.encoder(images)))
        return found

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, E, h, h] to pictures [B, 3, R, R]."""
        made: Tensor = self.vq.decoder(self.vq.post_quant_conv(codes))
        return made


@torch.no_grad()
def finished(model: JanusCodes) -> Any:
    """The trained ``JanusVQVAE``, its rows of unit length."""
    rows = model.vq.quantize.embedding.weight
    rows.copy_(F.normalize(rows, dim=-1))
    return model.vq.eval()


@torch.no_grad()
def tokens_of(vq: Any, pictures: Tensor) -> Tensor:
    """Tokens [B, T] of ``pictures`` [B, 3, R, R]."""
    found: Tensor = vq.encode(pictures, return_dict=True).image_tokens
    return found.view(len(pictures), -1)
