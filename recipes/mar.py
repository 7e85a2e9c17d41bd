"""``kl`` and ``mar``: autoencoder and MAR on emoji, as pocket/mar was made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch

from recipes.data import emoji
from recipes.training.kl import encode_moments, train_kl
from recipes.training.mar import train_mar
from specmm.image_ar.continuous.kl import KLConfig
from specmm.image_ar.continuous.loading import (
    check_models,
    check_same_vae,
    kl_fingerprint,
    load_kl,
    load_mar,
    pair_with,
)
from specmm.image_ar.continuous.mar import MARConfig
from specmm.image_ar.continuous.orders import MARSettings
from specmm.image_ar.continuous.pipeline import MARPipeline
from specmm.image_ar.files import save_module
from specmm.loading.files import writable
from specmm.recipes.recipe import Amount, Count, Found, Seed, Width

HEAD_STEPS = (
    "ddim100"  # "100" begins at t = 999, where a small model's error in eps is multiplied by 20,000
)


def kl(
    *,
    data: Path,
    steps: Count,
    batch: Count,
    seed: Seed,
    channels: Count,
    halvings: Annotated[int, 1, 4],
    kl_weight: Amount,
    compile: bool,
    out: Path,
) -> Found:
    """Train the KL autoencoder; the result is OUT/model.safetensors."""
    writable(out)
    images = torch.from_numpy(emoji(data).images)
    side = images.shape[1]
    widths = (1, 2, 2, 2, 2)[: halvings + 1]
    if side % 2**halvings:
        raise ValueError(f"halvings must divide pictures of {side} pixels evenly, got {halvings}")
    config = KLConfig(32, widths, 1, channels, side, (side // 2**halvings,), 1.0)
    options: dict[str, Any] = dict(
        steps=steps, batch=batch, kl_weight=kl_weight, seed=seed, compiled=compile
    )
    save_module(train_kl(images, config, out, **options), out)
    return {"kind": "kl", "steps": steps, "outputs": [str(out)]}


def mar(
    *,
    tokenizer: Path,
    data: Path,
    steps: Count,
    batch: Count,
    lr: Amount,
    seed: Seed,
    dim: Width,
    depth: Count,
    heads: Count,
    buffer: Count,
    head_width: Width,
    head_depth: Count,
    start: Path | None,
    beside: Path | None,
    out: Path,
) -> Found:
    """Train a MAR on the autoencoder's latents; the result is a whole model in OUT/model, or
    BESIDE/small.
    """
    writable(out)
    vae = load_kl(tokenizer)
    found = emoji(data)
    images = torch.from_numpy(found.images)
    labels = torch.from_numpy(found.labels)
    sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads}
    config = _config(
        vae, images.shape[1], len(found.classes), sizes, (buffer, head_depth, head_width)
    )
    moments = encode_moments(vae, images)
    begun = load_mar(start) if start else None
    rates = {"steps": steps, "batch": batch, "seed": seed}
    model = train_mar(moments, labels, vae.config.scale, config, out, start=begun, lr=lr, **rates)
    place = _save(model, vae, tuple(found.classes), out, beside)
    return {"kind": "mar", "steps": steps, "outputs": [str(place)]}


def _config(
    vae: Any, side: int, classes: int, sizes: dict[str, int], rest: tuple[int, int, int]
) -> Any:
    """Sizes of a MAR for ``vae``; ``rest``: buffer slots, depth and width of the head."""
    both: dict[str, Any] = {
        f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()
    }
    return MARConfig(
        img_size=side,
        vae_stride=vae.config.downsampling,
        vae_embed_dim=vae.config.z_channels,
        class_num=classes,
        buffer_size=rest[0],
        diffloss_d=rest[1],
        diffloss_w=rest[2],
        **both,
    )


def _save(model: Any, vae: Any, classes: tuple[str, ...], out: Path, beside: Path | None) -> Path:
    """Write a whole model, or the small model of the one in ``beside``; returns where."""
    if beside is None:
        folder = writable(out / "model")
        settings = MARSettings(min(64, model.config.seq_len), HEAD_STEPS, classes=classes)
        MARPipeline(model.eval(), vae, None, settings).save_pretrained(folder, torch.bfloat16)
        return folder
    check_models(load_mar(beside / "transformer"), model)
    check_same_vae(load_kl(beside / "vae"), kl_fingerprint(vae), beside)
    save_module(model.eval(), beside / "small", torch.bfloat16)
    pair_with(vae, beside)
    return beside / "small"
