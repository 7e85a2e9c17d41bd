"""``janus-tokenizer``, ``janus`` and ``janus-judge``: a Janus that draws emoji from words and is
asked about them, and a judge of what it draws, as pocket/janus was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch

from recipes.captioned import SIDE, captioned
from recipes.training.janus_vq import LEVELS, JanusCodes, finished, vq_config
from recipes.training.vq import train_codes
from specmm.files import writable
from specmm.recipes.recipe import Amount, Count, Found, Seed
from specmm.training import seeded

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
