"""MSD drafters, which see the picture, of vision-language models (``msd``): written to the model's
``drafters/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specmm.files import writable
from specmm.hf.drafters.features import acceptance_of
from specmm.hf.pretrained import find
from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.recipe import Amount, Count, Found, Open, Seed, beside
from specmm.recipes.text import place_of
from specmm.recipes.training.msd import msd_config, train_msd
from specmm.vlm.loading import load_model, load_processor
from specmm.vlm.msd import save_msd
from specmm.vlm.pipeline import VQAPipeline

LONGEST = 80  # tokens of an answer that acceptance is measured on


def msd(
    *,
    model: str,
    data: Open,
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
    target, processor = (
        VLMTarget(load_model(folder, torch.float32), Processor(), model),
        load_processor(folder),
    )
    sizes = {"num_hidden_layers": layers, **({"intermediate_size": width} if width else {})}
    options: dict[str, Any] = dict(
        batch=batch, lr=lr, noise=noise, probs_weight=probs_weight, passes=passes, seed=seed
    )
    opened = data(target, processor)
    options |= dict(config=msd_config(target, **sizes), ramp=ramp, read=opened.read)
    head = train_msd(target, opened.draw, writable(out), steps=steps, **options)
    asked = opened.questions(scenes)
    prompts = [VLMPrompt(asked.inputs(processor), LONGEST, asked)]
    ends = VQAPipeline(target.model, processor).ends()
    head.acceptance = acceptance_of(target, head, prompts, ends)
    save_msd(head, result, dtype=torch.bfloat16, embeddings=False)
    return {"kind": "msd", "model": model, "steps": steps, "outputs": [str(result)]}
