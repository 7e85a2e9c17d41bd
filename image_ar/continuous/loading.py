"""Reads and writes MAR and KL files, and checks which models may be used together.

``checkpoint-last.pth`` holds the averaged weights under ``model_ema``, which are loaded, and also
the raw weights and the command line's arguments; ``kl16.ckpt`` holds its weights under ``model``.
Both are read without running code. A small model is stored in ``small/`` beside the target, with
its autoencoder's fingerprint in ``pair.json``: another autoencoder's latents have the same shapes
but a different meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specmm.image_ar.continuous.kl import AutoencoderKL, KLConfig
from specmm.image_ar.continuous.mar import MAR, PUBLISHED, MARConfig
from specmm.image_ar.files import check_shared, count, load_module, shape_of, stack_sizes
from specmm.loading.checkpoints import NESTING, fingerprint, read_checkpoint, read_json
from specmm.loading.mapped import DtypeChoice

EMA = "model_ema"
KL_LEFTOVERS = ("loss",)  # the discriminator of latent diffusion's training
CELL = 16  # pixels a token side of the published models
PAIR = "pair.json"
SHARED = {  # what both models' configurations must agree on
    "token width": ["token_dim"],
    "order's length": ["seq_len"],
    "VAE stride": ["vae_stride"],
    "patch size": ["patch_size"],
    "number of classes": ["class_num"],
}
DECODED = {  # by the autoencoder
    "channels": ["vae_embed_dim", "z_channels"],
    "stride": ["vae_stride", "downsampling"],
}


def load_mar(
    path: str | Path,
    config: MARConfig | None = None,
    *,
    heads: int | None = None,
    dtype: DtypeChoice = torch.float32,
) -> MAR:
    """The model in the file or folder ``path``, in evaluation mode. ``dtype`` is the weights', or a
    function that chooses it by the number of parameters.

    Without ``config`` the sizes come from ``config.json`` beside the weights, else from the
    weights' shapes; ``heads`` is needed if neither gives the attention heads. Raises ``ValueError``
    when sizes are missing and, naming them, when weights are missing, extra or misshapen.
    """
    state = read_checkpoint(path, (EMA, *NESTING))
    infer = partial(infer_mar_config, heads=heads)
    return load_module(path, MAR, MARConfig, infer, config, state=state, dtype=dtype)


def load_kl(
    path: str | Path, config: KLConfig | None = None, *, dtype: torch.dtype = torch.float32
) -> AutoencoderKL:
    """The autoencoder in ``path``, in evaluation mode; sizes and errors as ``load_mar``."""
    common = (path, AutoencoderKL, KLConfig, infer_kl_config, config)
    return load_module(*common, leftovers=KL_LEFTOVERS, dtype=dtype)


def kl_fingerprint(model: AutoencoderKL) -> str:
    """Twelve hexadecimal digits that tell autoencoders apart, whatever their dtype."""
    return fingerprint(
        model.decoder.conv_in.weight, model.post_quant_conv.weight, model.quant_conv.weight
    )


def infer_mar_config(
    state: Mapping[str, Tensor], *, heads: int | None = None, source: str | Path = ""
) -> MARConfig:
    """Sizes of a MAR ``state`` by its shapes, at 16 pixels a token.

    Unless given, ``heads`` is the number of the published model of this width.
    """
    sizes: dict[str, int] = {}
    for side in ("encoder", "decoder"):
        dim = shape_of(state, f"{side}_norm.weight", source)[0]
        published = (
            p[f"{side}_num_heads"] for p in PUBLISHED.values() if p[f"{side}_embed_dim"] == dim
        )
        head_count = heads or next(published, None)
        if head_count is None:
            raise ValueError(
                f"heads must be given, because {source} does not contain it; pass heads, or put a "
                "config.json beside the file"
            )
        depth = count(state, rf"{side}_blocks\.(\d+)\.")
        sizes |= {f"{side}_embed_dim": dim, f"{side}_depth": depth, f"{side}_num_heads": head_count}
    length = shape_of(state, "diffusion_pos_embed_learned", source)[1]
    inner = shape_of(state, "encoder_blocks.0.mlp.fc1.weight", source)[0]
    config = MARConfig(
        img_size=round(length**0.5) * CELL,
        vae_stride=CELL,
        vae_embed_dim=shape_of(state, "z_proj.weight", source)[1],
        mlp_ratio=inner / sizes["encoder_embed_dim"],
        class_num=shape_of(state, "class_emb.weight", source)[0],
        buffer_size=shape_of(state, "encoder_pos_embed_learned", source)[1] - length,
        diffloss_d=count(state, r"diffloss\.net\.res_blocks\.(\d+)\."),
        diffloss_w=shape_of(state, "diffloss.net.input_proj.weight", source)[0],
        fake_latent="fake_latent" in state,
    )
    return replace(config, **sizes)  # type: ignore[arg-type]


def infer_kl_config(state: Mapping[str, Tensor], source: str | Path = "") -> KLConfig:
    """Sizes of an autoencoder's ``state`` by its shapes; the scale is the published one."""
    levels = range(count(state, r"encoder\.down\.(\d+)\."))
    attending = [i for i in levels if f"encoder.down.{i}.attn.0.q.weight" in state]
    return KLConfig(
        z_channels=shape_of(state, "post_quant_conv.weight", source)[0],
        attn_resolutions=tuple(KLConfig.resolution // 2**i for i in attending),
        **stack_sizes(state, source),
    )


def check_models(target: MAR, small: MAR) -> None:
    """Raise ``ValueError`` if ``small`` does not draw tokens of the same form as ``target``."""
    message = "drafter's {name} must be the target's {ours}, got {theirs}"
    check_shared(message, SHARED, target.config, small.config)


def check_vae(target: MAR, vae: AutoencoderKL) -> None:
    """Raise ``ValueError`` if ``vae`` cannot decode the tokens of ``target``."""
    message = "autoencoder's {name} must be the transformer's {ours}, got {theirs}"
    check_shared(message, DECODED, target.config, vae.config)


def check_same_vae(vae: AutoencoderKL, found: str, source: Path) -> None:
    """Raise ``ValueError`` unless ``vae`` has the fingerprint ``found`` beside a drafter."""
    expected = kl_fingerprint(vae)
    if found != expected:
        raise ValueError(f"drafter's VAE must be the target's {expected}, got {found} for {source}")


def load_small_mar(
    folder: Path, vae: AutoencoderKL, whole: bool = False, dtype: torch.dtype = torch.float32
) -> MAR | None:
    """The model in ``folder/small``, or a ``whole`` model's transformer; None if there is none.

    Raises ``ValueError`` when it was trained for another autoencoder than ``vae``.
    """
    small = folder / ("transformer" if whole else "small")
    if not small.is_dir():
        return None
    if whole:
        digest = kl_fingerprint(load_kl(folder / "vae"))
    else:
        digest = str(read_json(small / PAIR).get("vae"))
    check_same_vae(vae, digest, folder)
    return load_mar(small, dtype=dtype)


def pair_with(vae: AutoencoderKL, folder: Path) -> None:
    """Write into ``folder/small`` the fingerprint of ``vae``."""
    (folder / "small" / PAIR).write_text(json.dumps({"vae": kl_fingerprint(vae)}) + "\n")
