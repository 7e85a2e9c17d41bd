"""Drafters of text and vision-language models that read the target's states: EAGLE-3 heads
(``eagle3``), and a target's own MTP layers (``mtp``); written to the model's ``drafters/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specmm.files import writable
from specmm.hf.drafters.eagle3_files import save_eagle3
from specmm.hf.drafters.features import acceptance_of
from specmm.hf.drafters.mtp_layers import layers_of, save_layers, told_layers
from specmm.hf.pretrained import find_target, load_config
from specmm.recipes.recipe import Amount, Count, Found, Seed, Size, beside
from specmm.recipes.source import Source, sees
from specmm.recipes.text import place_of
from specmm.recipes.training.rollout import RolledEagle3, RolledMtp, build_eagle3, train_rollout
from specmm.recipes.training.seen import SeenRows


def eagle3(
    *,
    model: str,
    source: Source,
    steps: Count,
    batch: Count,
    lr: Amount,
    rollout: Count,
    layers: Count,
    inner: Size,
    slots: Size,
    vocabulary: Size,
    picture_slots: Size,
    scenes: Count,
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Train an EAGLE-3 head; the result is MODEL/drafters/eagle3."""
    folder = beside(model, find_target(model))
    place = place_of(folder, "eagle3", replace)
    if picture_slots and not sees(folder):
        raise ValueError(f"picture_slots must be 0 for a model without pictures, got {model}")
    lessons = source.lessons(folder, writable(out), seed, scenes)
    target, prompts = lessons.target, lessons.prompts(scenes)
    head = build_eagle3(target, layers, inner, lessons.vocabulary(vocabulary), picture_slots)
    seen = SeenRows(target, lessons.rows, lessons.read, head.config.layers, batch, seed)
    output = target.family.logits_of(head.ids)
    steps = source.steps(lessons.rows, batch, steps)
    options: dict[str, Any] = dict(steps=steps, lr=lr, rollout=rollout, slots=slots)
    train_rollout(head, RolledEagle3(head), output, seen.batch, out, **options)
    head.acceptance = acceptance_of(target, head, [prompts], lessons.ends)
    save_eagle3(head, place, target.model)
    return {"kind": "eagle3", "model": model, "steps": steps, "outputs": [str(place)]}


def mtp(
    *,
    model: str,
    source: Source,
    steps: Count,
    batch: Count,
    lr: Amount,
    rollout: Count,
    slots: Size,
    scenes: Count,
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Fine-tune the MTP layers of a model's checkpoint; the result is MODEL/drafters/mtp."""
    folder = beside(model, find_target(model))
    place = place_of(folder, "mtp", replace)
    told_layers(load_config(folder), folder)  # or the target would answer for minutes first
    lessons = source.lessons(folder, writable(out), seed, scenes)
    target = lessons.target
    layers = layers_of(target.model)
    rolled = RolledMtp(layers, target, rollout)
    seen = SeenRows(target, lessons.rows, lessons.read, (), batch, seed)
    output = target.family.logits
    steps = source.steps(lessons.rows, batch, steps)
    options: dict[str, Any] = dict(steps=steps, lr=lr, rollout=rollout, slots=slots)
    train_rollout(rolled.network, rolled, output, seen.batch, out, **options)
    save_layers(layers, place, target.model)
    return {"kind": "mtp", "model": model, "steps": steps, "outputs": [str(place)]}
