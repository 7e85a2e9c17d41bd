"""VAR's and CoDe's released code beside ours.

Their models are built by their constructors, not by their builders, which switch initialisation off
in torch's classes for the whole process, and load our weights: the names are the same. Tokens are
read where their code looks codes up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.official import duel
from benchmarks.official.duel import Draw, Made, Program
from benchmarks.official.releases import Modules, Source, running, with_constant, with_weights
from specmm import methods
from specmm.image_ar.autoencoder import to_uint8
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import Sampling
from specmm.image_ar.scales.scale_schedule import PATCHES_256, ScaleSchedule
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import VQVAE

FILES = ("models/var.py", "models/vqvae.py", "models/basic_vae.py")
MODULES = ("models.var", "models.vqvae", "models.basic_vae")
VAR_SOURCE = Source("var", "https://github.com/FoundationVision/VAR", FILES, MODULES)
CODE_SOURCE = Source("code", "https://github.com/czg1225/CoDe", (*FILES, "infer_CoDe.py"), MODULES)
REFINE = "autoregressive_infer_cfg_refine"


def their_vqvae(release: Modules, vae: VQVAE) -> Any:
    """Their tokenizer with the weights of ``vae``; their class fixes the decoder's sizes, so other
    ones are set in afterwards.
    """
    config = vae.config
    with running():
        made = release["models.vqvae"].VQVAE(
            vocab_size=config.vocab_size,
            z_channels=config.z_channels,
            ch=config.ch,
            quant_conv_ks=config.quant_conv_ks,
            quant_resi=config.quant_resi,
            share_quant_resi=config.share_quant_resi,
            v_patch_nums=config.patch_nums,
        )
        sizes = dict(ch=config.ch, ch_mult=config.ch_mult, num_res_blocks=config.num_res_blocks)
        blocks = release["models.basic_vae"]
        made.encoder = blocks.Encoder(double_z=False, z_channels=config.z_channels, **sizes)
        made.decoder = blocks.Decoder(z_channels=config.z_channels, **sizes)
    return with_weights(made, vae.state_dict())


def their_var(release: Modules, model: VAR, vqvae: Any) -> Any:
    """Their transformer with the weights of ``model``."""
    config = model.config
    with running():
        made = release["models.var"].VAR(
            vqvae,
            num_classes=config.num_classes,
            depth=config.depth,
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            mlp_ratio=config.mlp_ratio,
            norm_eps=config.norm_eps,
            shared_aln=config.shared_aln,
            attn_l2_norm=config.attn_l2_norm,
            patch_nums=config.patch_nums,
        )
    return with_weights(made, model.state_dict())


@contextmanager
def looked_up(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """The tokens [B, p²] that ``embedding`` is asked for, in order."""
    found: list[Tensor] = []
    hook = embedding.register_forward_hook(lambda _, given, __: found.append(given[0].clone()))
    try:
        yield found
    finally:
        hook.remove()


def cut(sampling: Sampling) -> dict[str, Any]:
    """Guidance and filters in the releases' words: 0 is off."""
    top_p = 0.0 if sampling.top_p == 1 else sampling.top_p
    return dict(cfg=sampling.cfg, top_k=sampling.top_k, top_p=top_p)


def official_var(release: Modules, model: VAR, vae: VQVAE, sampling: Sampling) -> Program:
    """Their ``autoregressive_infer_cfg``."""
    vqvae = their_vqvae(release, vae)
    var = their_var(release, model, vqvae)

    def drawing(given: Sampling) -> Draw:
        def draw(classes: Sequence[int], seed: int) -> Made:
            labels = torch.tensor(classes)
            with looked_up(vqvae.quantize.embedding) as tokens:
                images = var.autoregressive_infer_cfg(len(classes), labels, seed, **cut(given))
            return Made(to_uint8(images * 2 - 1), torch.cat(tokens, dim=1))

        return draw

    return Program(drawing(sampling), drawing(replace(sampling, top_k=1)))


def official_code(
    release: Modules, large: VAR, small: VAR, vae: VQVAE, sampling: Sampling, n: int
) -> Program:
    """Their drafter for the first ``n`` scales, and their refiner."""
    vqvae = their_vqvae(release, vae)
    drafter, refiner = (their_var(release, model, vqvae) for model in (large, small))
    refine = refining(refiner, large.config.schedule)
    scales = len(large.config.schedule)

    def drawing(given: Sampling) -> Draw:
        options = cut(given) | dict(top_k=[given.top_k] * scales, temp=[1.0] * scales)

        def draw(classes: Sequence[int], seed: int) -> Made:
            call = options | dict(B=len(classes), label_B=torch.tensor(classes), g_seed=seed)
            with looked_up(vqvae.quantize.embedding) as tokens:
                f_hat, inputs = drafter.autoregressive_infer_cfg_draft(exit_num=n, **call)
                images = refine(refiner, draft=inputs, f_hat=f_hat, entry_num=n, **call)
            return Made(to_uint8(images * 2 - 1), torch.cat(tokens, dim=1))

        return draw

    return Program(drawing(sampling), drawing(replace(sampling, top_k=1)))


def refining(refiner: Any, schedule: ScaleSchedule) -> Any:
    """Their refiner's function, with the lengths of ``schedule`` in place of the published ones."""
    lengths = (ScaleSchedule(PATCHES_256).starts[1:], schedule.starts[1:])
    return with_constant(getattr(type(refiner), REFINE), *lengths)


def ours(pipe: VARPipeline, method: methods.ScalesMethod, sampling: Sampling) -> Program:
    """Our pipeline's call."""
    names = ("cfg", "top_k", "top_p", "temperature")
    options = {name: getattr(sampling, name) for name in names}
    return duel.ours(pipe, {"top_k": 1}, method=method, **options)
