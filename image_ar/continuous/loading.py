"""Published and our own MAR and KL files as modules, and back to files under the official names.

``checkpoint-last.pth`` holds the averaged weights under ``model_ema`` (which are taken) beside the
trained ones and the command line's arguments; ``kl16.ckpt`` holds its weights under ``model``. Both
are read without running code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.checkpoints import NESTING, fingerprint, load_strict, read_checkpoint
from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, PUBLISHED, MARConfig
from specmm.image_ar.shared import count, read_config, save_module, shape_of

EMA = "model_ema"
KL_LEFTOVERS = ("loss",)  # the discriminator of latent diffusion's training
CELL = 16  # pixels a token side of the published models


def load_mar(
    path: str | Path,
    config: MARConfig | None = None,
    *,
    heads: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> MAR:
    """The model in the file or folder ``path``, in evaluation mode, with weights in ``dtype``.

    Without ``config`` the sizes are those of ``config.json`` beside the weights, else of the
    weights; the attention ``heads`` are needed where neither tells. Raises ``ValueError`` when
    sizes are missing and, naming them, when weights are missing, extra or misshapen.
    """
    state = read_checkpoint(path, (EMA, *NESTING))
    model = MAR(
        config or read_config(path, MARConfig) or infer_mar_config(state, heads=heads, source=path)
    )
    load_strict(model, state, source=path)
    return model.to(dtype).eval()


def load_kl(
    path: str | Path, config: KLConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> AutoencoderKL:
    """The autoencoder in the file or folder ``path``, in evaluation mode; sizes and errors as
    ``load_mar``.
    """
    state = read_checkpoint(path)
    model = AutoencoderKL(config or read_config(path, KLConfig) or infer_kl_config(state, path))
    load_strict(model, state, KL_LEFTOVERS, path)
    return model.to(dtype).eval()


def save_mar(model: MAR, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` (official names; ``dtype`` such as bf16 halves it) and
    ``config.json``.
    """
    save_module(model, model.config, folder, dtype)


def save_kl(model: AutoencoderKL, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``folder/model.safetensors`` and ``folder/config.json`` as ``save_mar`` does."""
    save_module(model, model.config, folder, dtype)


def kl_fingerprint(model: AutoencoderKL) -> str:
    """Twelve hexadecimal digits that tell autoencoders apart, whatever their dtype."""
    return fingerprint(
        model.decoder.conv_in.weight, model.post_quant_conv.weight, model.quant_conv.weight
    )


def infer_mar_config(
    state: Mapping[str, Tensor], *, heads: int | None = None, source: str | Path = ""
) -> MARConfig:
    """Sizes of a MAR ``state`` by its shapes, at 16 pixels a token; ``heads`` also by the published
    sizes.
    """
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        dim = shape_of(state, f"{side}_norm.weight", source)[0]
        depth = count(state, rf"{side}_blocks\.(\d+)\.")
        known = (
            p[f"{side}_num_heads"] for p in PUBLISHED.values() if p[f"{side}_embed_dim"] == dim
        )
        found = heads or next(known, None)
        if found is None:
            raise ValueError(
                f"heads must be given: {source} does not tell, pass it or put a config.json beside it"
            )
        sizes |= {f"{side}_embed_dim": dim, f"{side}_depth": depth, f"{side}_num_heads": found}
    length = shape_of(state, "diffusion_pos_embed_learned", source)[1]
    net = "diffloss.net"
    return MARConfig(
        img_size=round(length**0.5) * CELL,
        vae_stride=CELL,
        vae_embed_dim=shape_of(state, "z_proj.weight", source)[1],
        mlp_ratio=shape_of(state, "encoder_blocks.0.mlp.fc1.weight", source)[0]
        / sizes["encoder_embed_dim"],
        class_num=shape_of(state, "class_emb.weight", source)[0],
        buffer_size=shape_of(state, "encoder_pos_embed_learned", source)[1] - length,
        diffloss_d=count(state, r"diffloss\.net\.res_blocks\.(\d+)\."),
        diffloss_w=shape_of(state, f"{net}.input_proj.weight", source)[0],
        fake_latent="fake_latent" in state,
        **sizes,
    )


def infer_kl_config(state: Mapping[str, Tensor], source: str | Path = "") -> KLConfig:
    """Sizes of an autoencoder's ``state`` by its shapes; the scale is the published one."""
    ch = shape_of(state, "encoder.conv_in.weight", source)[0]
    levels = count(state, r"encoder\.down\.(\d+)\.")
    widths = [
        shape_of(state, f"encoder.down.{i}.block.0.conv1.weight", source)[0] for i in range(levels)
    ]
    with_attention = [i for i in range(levels) if f"encoder.down.{i}.attn.0.q.weight" in state]
    config = KLConfig(
        ch=ch,
        ch_mult=tuple(w // ch for w in widths),
        num_res_blocks=count(state, r"encoder\.down\.0\.block\.(\d+)\."),
        z_channels=shape_of(state, "post_quant_conv.weight", source)[0],
    )
    return replace(
        config, attn_resolutions=tuple(config.resolution // 2**i for i in with_attention)
    )
