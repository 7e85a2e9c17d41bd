"""``janus-tokenizer`` and ``janus``: a Janus that draws emoji from words and is asked about
them, as pocket/janus was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.models.janus.modeling_janus import JanusVQVAE

from recipes.captioned import SIDE, captioned
from recipes.training.janus import Sizes, build_model, train_model, train_tower
from recipes.training.janus_vq import LEVELS, JanusCodes, finished, tokens_of, vq_config
from recipes.training.vq import train_codes
from recipes.wording import build_processor, build_tokenizer
from specmm.core.randomness import seeded
from specmm.image_ar.files import write_settings
from specmm.image_ar.tokens.pipeline import LlamaGenSettings
from specmm.loading.files import writable
from specmm.recipes.drafter import kept_tokens
from specmm.recipes.pictures import to_float
from specmm.recipes.recipe import Amount, Count, Found, Seed, Share, Size

TOKENS = SIDE // 2 ** (len(LEVELS) - 1)  # a side


def tokenizer(
    *,
    data: Path,
    views: Count,
    steps: Count,
    batch: Count,
    lr: Amount,
    seed: Seed,
    codes: Annotated[int, 2],
    out: Path,
) -> Found:
    """Train the picture tokenizer, a ``JanusVQVAE``; the result is in OUT/model."""
    writable(out)
    images = torch.from_numpy(captioned(data, "train").views(views, seed)).flatten(0, 1)
    with seeded(seed):
        model = JanusCodes(vq_config(codes, TOKENS, 1))
    train_codes(model, images, out, steps=steps, batch=batch, lr=lr, seed=seed)
    finished(model).save_pretrained(out / "model")
    return {"kind": "janus-tokenizer", "steps": steps, "outputs": [str(out / "model")]}


def janus(
    *,
    tokenizer: Path,
    data: Path,
    views: Count,
    steps: Count,
    tower_steps: Size,
    batch: Count,
    lr: Amount,
    noise: Share,
    seed: Seed,
    dim: Annotated[int, 32],
    layers: Count,
    heads: Count,
    inner: Count,
    tower_dim: Annotated[int, 32],
    tower_layers: Count,
    cfg: Amount,
    temperature: Amount,
    out: Path,
) -> Found:
    """Train a Janus on the tokenizer's tokens; transformers loads OUT/model as it is."""
    writable(out)
    vq = JanusVQVAE.from_pretrained(tokenizer / "model").eval()
    pictures, held_out = (captioned(data, split) for split in ("train", "test"))
    shown = torch.from_numpy(pictures.views(views, seed))
    words = build_tokenizer(pictures)
    model = build_model(Sizes(dim, layers, heads, inner, tower_dim, tower_layers), vq, words, seed)
    rest: dict[str, Any] = dict(batch=batch, lr=lr, seed=seed)
    train_tower(model, pictures, shown, out / "tower", steps=tower_steps, **rest)
    unseen = (held_out, encoded(vq, torch.from_numpy(held_out.images)))
    codes = kept_tokens(
        vq, shown.numpy(), out / "tokens.pt", lambda: encoded(vq, shown.flatten(0, 1))
    ).unflatten(0, shown.shape[:2])
    train_model(model, words, pictures, shown, codes, unseen, out, steps=steps, noise=noise, **rest)
    model.eval().to(torch.bfloat16).save_pretrained(out / "model")
    build_processor(words, codes.shape[-1]).save_pretrained(out / "model")
    write_settings(LlamaGenSettings(cfg=cfg, temperature=temperature), out / "model")
    return {"kind": "janus", "steps": steps, "outputs": [str(out / "model")]}


def encoded(vq: JanusVQVAE, images: Tensor) -> Tensor:
    """Tokens [N, T] of ``images`` [N, R, R, 3] uint8."""
    parts = images.split(64)
    bar = tqdm(parts, desc="encode", mininterval=5)
    return torch.cat([tokens_of(vq, to_float(part)) for part in bar])
