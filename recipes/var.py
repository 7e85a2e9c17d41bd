"""``vqvae``, ``var`` and ``code``: a VAR on emoji with a small model beside it, as pocket/var was
made, and CoDe's specialised pair.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from recipes.data import emoji
from recipes.training.var import Examples, train_drafter, train_refiner, train_var
from recipes.training.vqvae import encode_pictures, train_vqvae
from specmm.image_ar.files import save_module
from specmm.image_ar.scales.collaborative import split
from specmm.image_ar.scales.loading import (
    check_models,
    check_same_tokenizer,
    load_var,
    load_vqvae,
    tokenizer_fingerprint,
)
from specmm.image_ar.scales.pipeline import VARPipeline
from specmm.image_ar.scales.sampling import VARSettings
from specmm.image_ar.scales.scale_schedule import ScaleSchedule
from specmm.image_ar.scales.var import VARConfig
from specmm.image_ar.scales.vqvae import VQVAEConfig
from specmm.loading.files import writable
from specmm.recipes.recipe import Count, Found, Seed, Width


def vqvae(
    *,
    data: Path,
    steps: Count,
    batch: Count,
    seed: Seed,
    codes: Annotated[int, 2],
    width: Count,
    sides: str,
    compile: bool,
    out: Path,
) -> Found:
    """Train the multi-scale tokenizer; the result is OUT/model.safetensors."""
    writable(out)
    schedule = _sides(sides)
    images = torch.from_numpy(emoji(data).images)
    levels = _levels(images.shape[1], schedule[-1])
    config = VQVAEConfig(codes, width, 32, (1, 2, 2, 2)[:levels], 1, schedule)
    model = train_vqvae(images, config, out, steps=steps, batch=batch, seed=seed, compiled=compile)
    save_module(model, out)
    return {"kind": "vqvae", "steps": steps, "outputs": [str(out)]}


def var(
    *,
    tokenizer: Path,
    data: Path,
    steps: Count,
    batch: Count,
    seed: Seed,
    depth: Count,
    dim: Width,
    heads: Count,
    shared_aln: bool,
    compile: bool,
    beside: Path | None,
    out: Path,
) -> Found:
    """Train a VAR on the tokenizer's tokens; the result is a whole model in OUT/model, or
    BESIDE/small.
    """
    writable(out)
    vae = load_vqvae(tokenizer)
    found = emoji(data)
    shared: dict[str, Any] = {
        n: getattr(vae.config, n) for n in ("vocab_size", "z_channels", "patch_nums")
    }
    sizes: dict[str, Any] = dict(depth=depth, embed_dim=dim, num_heads=heads, shared_aln=shared_aln)
    config = VARConfig(num_classes=len(found.classes), **sizes, **shared)
    examples = _examples(vae, found, out)
    model = train_var(examples, config, out, steps=steps, batch=batch, seed=seed, compiled=compile)
    if beside is None:
        place = out / "model"
        settings = VARSettings(classes=tuple(found.classes))
        VARPipeline(model, vae, None, settings).save_pretrained(place, torch.bfloat16)
    else:
        place = beside / "small"
        check_models(load_var(beside / "transformer"), model)
        check_same_tokenizer(load_vqvae(beside / "vae"), vae, beside)
        save_module(model, place, torch.bfloat16)
    return {"kind": "var", "steps": steps, "outputs": [str(place)]}


def code(
    *,
    model: str,
    small: str | None,
    n: int,
    data: Path,
    steps: Count,
    batch: Count,
    seed: Seed,
    compile: bool,
    out: Path,
) -> Found:
    """Specialise two models for CoDe at one N: the large on its coarse scales, the small distilled
    on its fine ones.
    """
    writable(out)
    pipe = VARPipeline.from_pretrained(model, "ar", torch.float32, small, device="cpu")
    if pipe.small is None:
        raise ValueError(f"{model} must hold a small model, got none, give one as small")
    scales = len(pipe.transformer.config.schedule)
    at = len(split(scales, n if n != -1 else scales - 2)[0])
    if at in (0, scales):
        raise ValueError(f"n must leave scales to both models, from 1 to {scales - 1}, got {at}")
    examples = _examples(pipe.vae, emoji(data), out)
    options: dict[str, Any] = dict(steps=steps, batch=batch, seed=seed, compiled=compile)
    drafter = train_drafter(pipe.transformer, examples, at, out / "drafter", **options)
    refiner = train_refiner(pipe.small, pipe.transformer, examples, at, out / "refiner", **options)
    pair = VARPipeline(drafter, pipe.vae, refiner, replace(pipe.settings, n=at))
    pair.save_pretrained(out / "model", torch.bfloat16)
    return {"kind": "code", "n": at, "steps": steps, "outputs": [str(out / "model")]}


def _sides(text: str) -> tuple[int, ...]:
    """The sides in "1,2,3"; raises ``ValueError`` when they are no schedule."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"sides must be whole numbers with commas between, got {text!r}")
    return ScaleSchedule(tuple(map(int, parts))).sides


def _levels(pixels: int, tokens: int) -> int:
    """Resolutions of a tokenizer that takes ``pixels`` to ``tokens`` along a side."""
    levels = (pixels // tokens).bit_length()
    if pixels != tokens * 2 ** (levels - 1) or not 1 <= levels <= 4:
        raise ValueError(f"the last side must be {pixels} pixels over 1, 2, 4 or 8, got {tokens}")
    return levels


def _examples(vae: Any, found: Any, out: Path) -> Any:
    """The pictures' tokens, kept in ``out`` for the next run, with their labels."""
    sides = "-".join(map(str, vae.config.patch_nums))
    file = out / f"tokens-{tokenizer_fingerprint(vae)}-{sides}-{len(found.images)}.pt"
    if not file.exists():
        torch.save(encode_pictures(vae, torch.from_numpy(found.images)), file)
    tokens = torch.load(file, weights_only=True)
    return Examples(tokens, torch.from_numpy(found.labels), vae.quantize, len(found.classes))
