"""Which models go together: a target, an autoencoder, and a small model that drafts the same
tokens.

A small model is kept in ``small/`` beside the target, with its autoencoder's fingerprint in
``pair.json``: latents of another autoencoder have the same shapes and mean something else.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from specmm.checkpoints import read_json
from specmm.image_ar.continuous.kl import AutoencoderKL
from specmm.image_ar.continuous.loading import kl_fingerprint, load_kl, load_mar, save_mar
from specmm.image_ar.continuous.mar import MAR

PAIR = "pair.json"
SHARED = {  # what both models' configurations must agree on
    "token_dim": "token width",
    "seq_len": "order's length",
    "vae_stride": "VAE stride",
    "patch_size": "patch size",
    "class_num": "number of classes",
}


def check_pair(target: MAR, small: MAR) -> None:
    """Raise ``ValueError`` when ``small`` makes other tokens than ``target``."""
    for field, name in SHARED.items():
        ours, theirs = getattr(target.config, field), getattr(small.config, field)
        if ours != theirs:
            raise ValueError(f"drafter's {name} must be the target's {ours}, got {theirs}")


def check_vae(target: MAR, vae: AutoencoderKL) -> None:
    """Raise ``ValueError`` when ``vae`` does not decode what ``target`` makes."""
    for name, ours, theirs in (
        ("channels", target.config.vae_embed_dim, vae.config.z_channels),
        ("stride", target.config.vae_stride, vae.config.downsampling),
    ):
        if ours != theirs:
            raise ValueError(f"autoencoder's {name} must be the transformer's {ours}, got {theirs}")


def check_same_vae(vae: AutoencoderKL, found: str, source: Path) -> None:
    """Raise ``ValueError`` when a drafter's autoencoder, known by the fingerprint ``found``, is not
    ``vae``.
    """
    wanted = kl_fingerprint(vae)
    if found != wanted:
        raise ValueError(f"drafter's VAE must be the target's {wanted}, got {found} for {source}")


def load_small(folder: Path, vae: AutoencoderKL, whole: bool = False) -> MAR | None:
    """The small model in ``folder/small``, or that of a ``whole`` model's folder; None when there
    is none.

    Raises ``ValueError`` when it was trained for another autoencoder than ``vae``.
    """
    place = folder / ("transformer" if whole else "small")
    if not place.is_dir():
        return None
    found = (
        kl_fingerprint(load_kl(folder / "vae"))
        if whole
        else str(read_json(place / PAIR).get("vae"))
    )
    check_same_vae(vae, found, folder)
    return load_mar(place)


def save_small(
    small: MAR, folder: Path, vae: AutoencoderKL, dtype: torch.dtype | None = None
) -> None:
    """Write ``folder/small`` with the fingerprint of ``vae``."""
    save_mar(small, folder / "small", dtype)
    (folder / "small" / PAIR).write_text(json.dumps({"vae": kl_fingerprint(vae)}) + "\n")
