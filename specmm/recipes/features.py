"""Drafters of text and vision-language models that read the target's states: EAGLE-3 heads
(``eagle3``), and a target's own MTP layers (``mtp``); written to the model's ``drafters/``.
"""

from __future__ import annotations

from specmm.hf.drafters.eagle3_files import save_eagle3
from specmm.hf.drafters.features import acceptance_of
from specmm.hf.drafters.mtp_layers import layers_of, save_layers, told_layers
from specmm.hf.pretrained import load_config
from specmm.recipes.recipe import Count, Found, Recipe, Size
from specmm.recipes.settings import Targeted, sees, served
from specmm.recipes.source import Source
from specmm.recipes.training.rollout import RolledEagle3, RolledMtp, build_eagle3, train_rollout


def eagle3(
    *,
    model: str,
    source: Source,
    training: Targeted,
    rollout: Count,
    layers: Count,
    inner: Size,
    slots: Size,
    vocabulary: Size,
    picture_slots: Size,
    recipe: Recipe,
) -> Found:
    """Train an EAGLE-3 head; the result is MODEL/drafters/eagle3."""
    begun = training.begun(model, "eagle3", recipe)
    if picture_slots and not sees(begun.folder):
        raise ValueError(f"picture_slots must be 0 for a model without pictures, got {model}")
    lessons = source.lessons(begun)
    target = begun.target
    head = build_eagle3(target, layers, inner, lessons.vocabulary(vocabulary), picture_slots)
    measure = begun.tau("eagle3", head, head, lessons.prompt, lessons.ends)
    run = begun.run(lessons.rows, lessons.key, measure=measure)
    draw = begun.seen(lessons, head.config.layers).batch
    output = target.family.logits_of(head.ids)
    train_rollout(head, RolledEagle3(head), output, draw, run, rollout=rollout, slots=slots)

    def save() -> None:
        with served(head, target.dtype):
            head.acceptance = acceptance_of(target, head, [lessons.prompt], lessons.ends)
        save_eagle3(head, begun.place, target.model)

    return begun.end(save, run)


def mtp(
    *, model: str, source: Source, training: Targeted, rollout: Count, slots: Size, recipe: Recipe
) -> Found:
    """Fine-tune the MTP layers of a model's checkpoint; the result is MODEL/drafters/mtp."""
    begun = training.begun(model, "mtp", recipe)
    told_layers(load_config(begun.folder), begun.folder)  # or the target would answer first
    lessons = source.lessons(begun)
    target = begun.target
    layers = layers_of(target.model)
    rolled = RolledMtp(layers, target, rollout)
    measure = begun.tau("mtp", layers, rolled.network, lessons.prompt, lessons.ends)
    run = begun.run(lessons.rows, lessons.key, measure=measure)
    draw, output = begun.seen(lessons, ()).batch, target.family.logits
    train_rollout(rolled.network, rolled, output, draw, run, rollout=rollout, slots=slots)
    return begun.end(lambda: save_layers(layers, begun.place, target.model), run)
