"""Correctors of Jacobi drafts for models that draw pictures token by token (``corrector``), written
to the model's ``drafters/``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch

from specmm.drawing import DrawingTarget
from specmm.files import writable
from specmm.hf.picture_tokens import picture_prompt
from specmm.image_ar.pipeline import picture_type
from specmm.image_ar.shared import write_settings
from specmm.image_ar.tokens.loading import save_drafters_of, target_fingerprint
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline, LlamaGenSettings
from specmm.image_ar.tokens.target import Prompt
from specmm.image_ar.transformers_pipeline import TransformersImagePipeline
from specmm.recipes.drafter import drafter_folders
from specmm.recipes.prompted_drafter import prompts_in
from specmm.recipes.recipe import Amount, Count, Found, Seed, Size
from specmm.recipes.training.block_drafter import measure_taus
from specmm.recipes.training.corrector import replaced, train_corrector

KIND = "corrector"
HELD = 32  # pictures that tau is measured on


def corrector(
    *,
    model: str,
    drawn: Count,
    steps: Count,
    batch: Count,
    seed: Seed,
    inner: Size,
    overlap_weight: Amount,
    lr: Annotated[float, 1e-6],
    prompts: Path | None,
    cfg: float | None,
    replace: bool,
    out: Path,
) -> Found:
    """Train a corrector for a model; the result is MODEL/drafters/corrector."""
    place, result = drafter_folders(model, KIND, replace)
    kept = writable(out)
    opened = _of_classes if picture_type(place) is None else _of_prompts
    target, prompt_of, settings, fingerprint = opened(place, prompts, cfg)
    places = replaced(target, prompt_of, drawn, seed)
    sizes: dict[str, Any] = dict(inner=inner, steps=steps, batch=batch, lr=lr, seed=seed)
    head = train_corrector(target, places, kept, overlap_weight=overlap_weight, **sizes)
    save_drafters_of(fingerprint, {KIND: head}, result.parent, torch.bfloat16)
    held = range(drawn, drawn + HELD)
    taus = settings.taus | measure_taus({KIND: head}, target, prompt_of(held), held)
    write_settings(dataclasses.replace(settings, taus=taus), place)
    return {"kind": KIND, "model": model, "steps": steps, "outputs": [str(result)]}


Opened = tuple[DrawingTarget, Callable[[range], Any], LlamaGenSettings, str]
"""A target at the model's sampling, the prompt of some of its pictures, the model's settings and
its fingerprint.
"""


def _of_classes(place: Path, prompts: Path | None, cfg: float | None) -> Opened:
    """A LlamaGen that draws classes, all in turn."""
    pipe = LlamaGenPipeline.from_pretrained(place, torch_dtype=torch.float32)
    if pipe.takes != "classes" or prompts is not None:
        raise ValueError("a LlamaGen must draw classes, for a corrector learns from no prompts")
    config = pipe.transformer.config

    def prompt_of(some: range) -> Prompt:
        return Prompt(torch.tensor(some) % config.num_classes)

    made = target_fingerprint(pipe.transformer)
    return pipe.target(cfg=cfg), prompt_of, pipe.settings, made


def _of_prompts(place: Path, prompts: Path | None, cfg: float | None) -> Opened:
    """A model of transformers that draws prompts, all in turn."""
    if prompts is None:
        raise ValueError("a corrector needs what to draw: give --set prompts=FILE, a prompt a line")
    texts = prompts_in(prompts)
    pipe = TransformersImagePipeline.from_pretrained(place, device="cpu", dtype="float32")
    target = pipe.target(cfg=cfg, layout=pipe._layout(None, None))
    ids = [pipe._ids(text, target.layout) for text in texts]
    away = [pipe._away(row, None, target.layout) for row in ids]

    def prompt_of(some: range) -> Any:
        rows = [i % len(texts) for i in some]
        return picture_prompt(target, [ids[i] for i in rows], [away[i] for i in rows])

    return target, prompt_of, pipe.settings, pipe.owner.fingerprint
