"""LlamaGen's released code beside ours: its ``generate`` and its tokenizer, with our weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.official import duel
from benchmarks.official.duel import Draw, Made, Program
from benchmarks.official.releases import Modules, Source, running, with_weights
from specmm import methods
from specmm.image_ar.autoencoder import VQModel, to_uint8
from specmm.image_ar.tokens.gpt import GPTConfig
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline

GPT = "autoregressive.models.gpt"
GENERATE = "autoregressive.models.generate"
VQ = "tokenizer.tokenizer_image.vq_model"
SOURCE = Source(
    "llamagen",
    "https://github.com/FoundationVision/LlamaGen",
    tuple(f"{name.replace('.', '/')}.py" for name in (GPT, GENERATE, VQ)),
    (GPT, GENERATE, VQ),
)


def their_gpt(release: Modules, config: GPTConfig, weights: dict[str, Any]) -> Any:
    """Their transformer with our ``weights``."""
    sizes = vars(config) | dict(class_dropout_prob=0.1)
    with running():
        made = release[GPT].Transformer(release[GPT].ModelArgs(**sizes))
    return with_weights(made, weights)


def their_vq(theirs: Any, vq: VQModel) -> Any:
    """The tokenizer of their module with the weights of ``vq``; sizes that their class fixes are
    set in.
    """
    config = vq.config
    with running():
        made = theirs.VQModel(
            theirs.ModelArgs(
                codebook_size=config.codebook_size,
                codebook_embed_dim=config.codebook_embed_dim,
                codebook_l2_norm=config.codebook_l2_norm,
                codebook_show_usage=False,
                z_channels=config.z_channels,
            )
        )
        sizes: dict[str, Any] = dict(ch=config.ch, ch_mult=config.ch_mult)
        sizes |= dict(num_res_blocks=config.num_res_blocks, z_channels=config.z_channels)
        made.encoder = theirs.Encoder(**sizes)
        made.decoder = theirs.Decoder(**sizes)
    return with_weights(made, vq.state_dict())


def their_pictures(vq: Any, tokens: Tensor) -> Tensor:
    """Pictures uint8 [B, R, R, 3] of ``tokens`` [B, L] by their tokenizer."""
    side = round(tokens.shape[1] ** 0.5)
    width = vq.quantize.embedding.weight.shape[1]
    return to_uint8(vq.decode_code(tokens, [len(tokens), width, side, side]))


def official(release: Modules, pipe: LlamaGenPipeline) -> Program:
    """Their ``generate`` with the settings of ``pipe``."""
    config = pipe.transformer.config
    gpt = their_gpt(release, config, pipe.transformer.state_dict())
    vq = their_vq(release[VQ], pipe.vq)
    given = pipe.settings
    cut = dict(cfg_scale=given.cfg, cfg_interval=given.cfg_interval, top_k=given.top_k)
    cut |= dict(top_p=given.top_p, temperature=given.temperature)

    def drawing(sampled: bool) -> Draw:
        def draw(classes: Sequence[int], seed: int) -> Made:
            torch.manual_seed(seed)
            tokens = release[GENERATE].generate(
                gpt, torch.tensor(classes), config.block_size, sample_logits=sampled, **cut
            )
            return Made(their_pictures(vq, tokens), tokens)

        return draw

    return Program(drawing(True), drawing(False))


def ours(pipe: LlamaGenPipeline, method: methods.Method) -> Program:
    """Our pipeline's call with its settings."""
    return duel.ours(pipe, {"temperature": 0.0}, method=method)
