"""``coder``: a small language model of Python source code, as pocket/coder was made.

Other sizes with its tokenizer make a small autoregressive model to compare drafters with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch

from recipes.training.coder import build_tokenizer, evaluate, train_target
from specmm.hf.loading.pretrained import load_tokenizer
from specmm.loading.files import writable
from specmm.recipes.recipe import Amount, Count, Found, Seed, Width
from specmm.recipes.training.small_qwen import Sizes, build_model
from specmm.recipes.training.texts import read_files, text_stream


def coder(
    *,
    steps: Count,
    batch: Count,
    lr: Amount,
    seed: Seed,
    dim: Width,
    layers: Count,
    heads: Count,
    vocabulary: Annotated[int, 300],
    tokenizer: Path | None,
    out: Path,
) -> Found:
    """Train a Qwen2 on the Python standard library and installed packages; transformers loads it as
    it is.
    """
    writable(out)
    sizes = Sizes(dim, layers, heads)
    words = _tokenizer(out, tokenizer, vocabulary)
    learnt, held_out = (text_stream(words, out, held_out=side) for side in (False, True))
    model = build_model(sizes, words, seed)
    train_target(model, learnt, held_out, out, steps=steps, batch=batch, lr=lr, seed=seed)
    loss = float(evaluate(model, held_out, 128))
    model.eval().to(torch.bfloat16).save_pretrained(out / "model")
    words.save_pretrained(out / "model")
    found = {"kind": "coder", "steps": steps, "held_out_loss": loss, "train_tokens": len(learnt)}
    return {**found, "outputs": [str(out / "model")]}


def _tokenizer(out: Path, given: Path | None, vocabulary: int) -> Any:
    """The tokenizer in ``given``, or that of an earlier run in ``out``, or one learnt now."""
    own = out / "tokenizer"
    if given is None and not own.exists():  # a resumed run goes on with the same tokens
        build_tokenizer(read_files(False).values(), vocabulary).save_pretrained(own)
    return load_tokenizer(given or own)
