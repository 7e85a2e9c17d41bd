"""``tokenizer`` and ``target``: a LlamaGen on emoji, as pocket/llamagen was made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F

from recipes.data import emoji
from recipes.training.llamagen import train_target
from recipes.training.vq import train_tokenizer
from specmm.image_ar.autoencoder import VQConfig
from specmm.image_ar.files import save_module
from specmm.image_ar.tokens.gpt import GPTConfig
from specmm.image_ar.tokens.loading import load_vq
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline, LlamaGenSettings
from specmm.loading.files import writable
from specmm.recipes.drafter import picture_tokens
from specmm.recipes.recipe import Count, Found, Seed, Width


def tokenizer(
    *, data: Path, steps: Count, batch: Count, seed: Seed, codes: Annotated[int, 2], out: Path
) -> Found:
    """Train the VQ tokenizer; the result is OUT/model.safetensors."""
    writable(out)
    images = torch.from_numpy(emoji(data).images)
    config = VQConfig(codes, 8, 32, (1, 2, 2), 1, 64)
    model = train_tokenizer(images, config, out, steps=steps, batch=batch, seed=seed)
    rows = model.quantize.embedding.weight.data
    rows.copy_(
        F.normalize(rows, dim=-1)
    )  # the same codes; LANTERN's distances are those of the rows as stored
    save_module(model, out)
    return {"kind": "tokenizer", "steps": steps, "outputs": [str(out)]}


def target(
    *,
    tokenizer: Path,
    data: Path,
    steps: Count,
    batch: Count,
    seed: Seed,
    dim: Width,
    layers: Count,
    heads: Count,
    out: Path,
) -> Found:
    """Train the transformer on the tokenizer's tokens; the result is a whole model in OUT/model."""
    writable(out)
    vq = load_vq(tokenizer)
    pictures = emoji(data)
    tokens = picture_tokens(vq, pictures.images, out)
    sizes: dict[str, Any] = dict(
        dim=dim, n_layer=layers, n_head=heads, num_classes=len(pictures.classes)
    )
    config = GPTConfig(vocab_size=vq.config.codebook_size, block_size=tokens.shape[-1], **sizes)
    labels = torch.from_numpy(pictures.labels)
    model = train_target(tokens, labels, config, out, steps=steps, batch=batch, seed=seed)
    pipe = LlamaGenPipeline(model.eval(), vq, {}, LlamaGenSettings(classes=tuple(pictures.classes)))
    pipe.save_pretrained(out / "model", torch.bfloat16)
    return {"kind": "target", "steps": steps, "outputs": [str(out / "model")]}
