"""The models of a pipeline: a large VAR, perhaps a small one that shares its tokenizer, and the
tokenizer.

What may go together is checked here, before anything is drawn.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specmm import zoo
from specmm.checkpoints import fingerprint
from specmm.hardware import gpu_has_bfloat16
from specmm.image_ar.scales.loading import load_var, load_vqvae, save_var
from specmm.image_ar.scales.var import VAR
from specmm.image_ar.scales.vqvae import VQVAE

SHARED = ("patch_nums", "num_classes", "vocab_size", "z_channels")


def check_tokenizer(model: VAR, vqvae: VQVAE) -> None:
    """Raise ``ValueError`` naming what ``model`` and its tokenizer do not share."""
    for name in ("patch_nums", "vocab_size", "z_channels"):
        ours, theirs = getattr(model.config, name), getattr(vqvae.config, name)
        if ours != theirs:
            raise ValueError(
                f"transformer and tokenizer must share {name}, got {ours} and {theirs}"
            )


def check_pair(large: VAR, small: VAR) -> None:
    """Raise ``ValueError`` naming what two models that are to draw one picture do not share."""
    for name in SHARED:
        ours, theirs = getattr(large.config, name), getattr(small.config, name)
        if ours != theirs:
            raise ValueError(
                f"the two models must share {name}, got {ours} (large) and {theirs} (small)"
            )


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` when ``device`` cannot compute in the half precision ``dtype``."""
    if dtype == torch.float16 and device.type == "cpu":
        raise ValueError("float16 must run on a GPU, got a CPU, use bfloat16 or float32")
    if dtype == torch.bfloat16 and device.type == "cuda" and not gpu_has_bfloat16():
        raise ValueError(
            "bfloat16 must run on a GPU that has it, got one without, use float16 or float32"
        )


def load_small(name: str | Path, vqvae: VQVAE) -> VAR:
    """The transformer of the model folder, pocket name or hub id ``name``, or of a plain weights
    file or folder.

    Raises ``ValueError`` when a tokenizer lies beside it that is not ``vqvae``.
    """
    file = Path(name)
    ours = file if file.name == "model.safetensors" else file / "model.safetensors"
    if ours.is_file():
        file, folder = ours.parent, ours.resolve().parents[1]  # of a whole model, if it lies in one
    elif file.is_file():
        return load_var(file)
    else:
        folder = zoo.find(name)
        file = folder / "transformer"
    if (folder / "vae").is_dir():
        _check_same(load_vqvae(folder / "vae"), vqvae, folder)
    return load_var(file)


def save_small(small: VAR, folder: Path, vqvae: VQVAE, dtype: torch.dtype | None = None) -> Path:
    """Write ``small`` beside the large model in ``folder`` and say where; the two must fit,
    tokenizer and all.
    """
    check_pair(load_var(folder / "transformer"), small)
    _check_same(load_vqvae(folder / "vae"), vqvae, folder)
    save_var(small, folder / "small", dtype)
    return folder / "small"


def _check_same(theirs: VQVAE, ours: VQVAE, folder: Path) -> None:
    if tokenizer_fingerprint(theirs) != tokenizer_fingerprint(ours):
        raise ValueError(
            f"the two models must share their tokenizer, got another one in {folder / 'vae'}"
        )


def tokenizer_fingerprint(vqvae: VQVAE) -> str:
    """Tells tokenizers apart by what makes tokens mean something: codes, φ, decoder's first layer."""
    phi = [w for n, w in vqvae.quantize.named_parameters() if w.ndim == 4]
    return fingerprint(vqvae.quantize.embedding.weight, *phi, vqvae.post_quant_conv.weight)
