"""MSD drafters, which see the picture, of vision-language models (``msd``): written to the model's
``drafters/``.
"""

from __future__ import annotations

from typing import Any

import torch

from specmm.hf.drafters.features import acceptance_of
from specmm.recipes.recipe import Amount, Count, Found, Recipe
from specmm.recipes.settings import Targeted, served
from specmm.recipes.source import Data, key_of
from specmm.recipes.training.msd import build_msd, msd_config, train_msd
from specmm.training import one_first
from specmm.vlm.msd import save_msd


def msd(
    *,
    model: str,
    source: Data,
    training: Targeted,
    noise: Amount,
    probs_weight: Amount,
    passes: Count,
    layers: Count,
    ramp: Count | None,
    width: Count | None,
    recipe: Recipe,
) -> Found:
    """Train an MSD drafter in two stages, text first; the result is MODEL/drafters/msd."""
    begun = training.begun(model, "msd", recipe)
    with one_first():
        opened = source.opened(begun)
    if True not in opened.sorts:
        raise ValueError("data must hold pictures or videos for an MSD drafter, got text alone")
    target, ends = begun.target, opened.reader.stops
    prompt = opened.prompts(training.scenes)
    sizes = {"num_hidden_layers": layers, **({"intermediate_size": width} if width else {})}
    head = build_msd(target, msd_config(target, **sizes), training.seed)
    rows = opened.rows(None)
    measure = begun.tau("msd", head, head, prompt, ends)
    run = begun.run(rows, key_of(chat.said for chat in rows), measure=measure)
    options: dict[str, Any] = dict(noise=noise, probs_weight=probs_weight, passes=passes)
    options |= dict(batch=training.batch, seed=training.seed, ramp=ramp, read=opened.read)
    train_msd(target, head, opened.draw, run, sorts=opened.sorts, **options)

    def save() -> None:
        with served(head, target.dtype):
            head.acceptance = acceptance_of(target, head, [prompt], ends)
        save_msd(head, begun.place, dtype=torch.bfloat16, embeddings=False)

    return begun.end(save, run)
