"""MSD drafters, which see the picture, of vision-language models (``msd``): written to the model's
``drafters/``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from specmm.files import writable
from specmm.hf.drafters.features import acceptance_of
from specmm.hf.pretrained import find
from specmm.recipes.recipe import Amount, Count, Found, Seed, beside
from specmm.recipes.source import Data, load_frozen
from specmm.recipes.text import place_of
from specmm.recipes.training.msd import msd_config, train_msd
from specmm.vlm.msd import save_msd


def msd(
    *,
    model: str,
    source: Data,
    steps: Count,
    batch: Count,
    lr: Amount,
    noise: Amount,
    probs_weight: Amount,
    passes: Count,
    layers: Count,
    ramp: Count | None,
    width: Count | None,
    scenes: Count,
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Train an MSD drafter in two stages, text first; the result is MODEL/drafters/msd."""
    folder = beside(model, find(model))
    result = place_of(folder, "msd", replace)
    load = cache(lambda: load_frozen(folder))
    opened = source.opened(folder, load, writable(out), seed)
    if True not in opened.sorts:
        raise ValueError("data must hold pictures or videos for an MSD drafter, got text alone")
    target, prompts = load(), opened.prompts(scenes)
    sizes = {"num_hidden_layers": layers, **({"intermediate_size": width} if width else {})}
    options: dict[str, Any] = dict(
        batch=batch, lr=lr, noise=noise, probs_weight=probs_weight, passes=passes, seed=seed
    )
    options |= dict(config=msd_config(target, **sizes), ramp=ramp, read=opened.read)
    head = train_msd(target, opened.draw, out, steps=steps, sorts=opened.sorts, **options)
    head.acceptance = acceptance_of(target, head, [prompts], opened.reader.stops)
    save_msd(head, result, dtype=torch.bfloat16, embeddings=False)
    return {"kind": "msd", "model": model, "steps": steps, "outputs": [str(result)]}
