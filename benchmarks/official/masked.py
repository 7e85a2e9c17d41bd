"""MAR's released code beside ours: its ``sample_tokens``, with our weights.

Pixels are decoded by our tokenizer on both sides. Random numbers are drawn otherwise there, so that
pictures cannot be compared; what can be are the networks (``network_gap``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.official import duel
from benchmarks.official.duel import Made, Program
from benchmarks.official.releases import Modules, Source, running, with_weights
from specmm import methods
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.continuous.pipeline import MARPipeline

MODULE = "models.mar"
SOURCE = Source(
    "mar",
    "https://github.com/LTH14/mar",
    ("models/mar.py", "models/diffloss.py", "diffusion/gaussian_diffusion.py"),
    (MODULE,),
)


def their_mar(release: Modules, pipe: MARPipeline) -> Any:
    """Their model with the weights of ``pipe``'s."""
    given = {k: v for k, v in vars(pipe.transformer.config).items() if k != "fake_latent"}
    norm = partial(nn.LayerNorm, eps=1e-6)  # as their builders have it
    steps = pipe.settings.head_steps
    with running():
        made = release[MODULE].MAR(num_sampling_steps=steps, norm_layer=norm, **given)
    return with_weights(made, pipe.transformer.state_dict())


def official(theirs: Any, pipe: MARPipeline) -> Program:
    """Their ``sample_tokens`` with the settings of ``pipe``."""
    s = pipe.settings
    options = dict(num_iter=s.num_iter, cfg=s.cfg, cfg_schedule=s.cfg_schedule)
    options |= dict(temperature=s.temperature)

    def draw(classes: Sequence[int], seed: int) -> Made:
        torch.manual_seed(seed)
        np.random.seed(seed)
        latents = theirs.sample_tokens(len(classes), labels=torch.tensor(classes), **options)
        return Made(to_uint8(pipe.vae.decode_scaled(latents)), latents.flatten(2))

    return Program(draw, draw)


def ours(pipe: MARPipeline, method: methods.ContinuousMethod) -> Program:
    """Our pipeline's call with its settings."""
    return duel.ours(pipe, {}, method=method)


@torch.inference_mode()
def network_gap(theirs: Any, pipe: MARPipeline) -> float:
    """The largest difference of the two models' outputs where every other token is known, as a
    share of the largest output: of the transformer, and of the head on it.
    """
    config = pipe.transformer.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, config.seq_len, config.token_dim, generator=generator)
    known = torch.arange(0, config.seq_len, 2).expand(2, -1)
    labels = torch.arange(2)
    mask = torch.ones(2, config.seq_len).scatter(1, known, 0.0)
    with running():
        encoded = theirs.forward_mae_encoder(tokens, mask, theirs.class_emb(labels))
        z = theirs.forward_mae_decoder(encoded, mask)
        heads = theirs.diffloss.net(tokens[0], torch.arange(config.seq_len), z[0])
    own = pipe.transformer(tokens, known, pipe.transformer.embed_classes(labels))
    own_heads = pipe.transformer.head(tokens[0], torch.arange(config.seq_len), own[0])
    pairs = ((z, own), (heads, own_heads))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
