"""Drafters of text models (``deer``, ``dflash``, ``diffusion``, ``proxy``), written to the model's
``drafters/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch

from specmm.checkpoints import read_json
from specmm.diffusion_drafters.assemble import PROXY
from specmm.diffusion_drafters.models.deer import save_deer
from specmm.diffusion_drafters.models.dflash import load_dflash, save_dflash
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention
from specmm.files import writable
from specmm.hardware import named_device
from specmm.hf.drafters.files import check_target
from specmm.hf.drafting import KINDS
from specmm.hf.pretrained import find_target, load_config, load_tokenizer, weights_folder
from specmm.recipes.recipe import Count, Found, Recipe, Share, Size, beside
from specmm.recipes.settings import Targeted, Training
from specmm.recipes.source import Source, key_of
from specmm.recipes.training.deer import build_deer, train_deer
from specmm.recipes.training.dflash import build_block, layers_read, train_block, with_memory
from specmm.recipes.training.masked_diffusion import save_dream, train_diffusion
from specmm.recipes.training.ngram import fit
from specmm.recipes.training.small_qwen import Sizes, build_model
from specmm.recipes.training.texts import text_stream
from specmm.training import one_first, own_device

# of a block drafter, which start brings
SIZES = ("layers", "block", "mask", "inner", "read", "markov", "vocabulary")
Block = Annotated[int, 2]  # drafts a round


def deer(
    *,
    model: str,
    source: Source,
    training: Targeted,
    layers: Count,
    block: Block,
    mask: Size | None,
    inner: Size,
    first_stage: Share,
    alpha: Annotated[float, 1],
    recipe: Recipe,
) -> Found:
    """Train a DEER drafter: its own layers between the target's embedding and head; the result is
    drafters/deer.
    """
    begun = training.begun(model, "deer", recipe)
    target, end = begun.target, begun.tokenizer.eos_token_id
    drafter = build_deer(target, layers, block, begun.mask(mask), end, inner)
    lessons = source.lessons(begun)
    measure = begun.tau("deer", drafter, drafter.model, lessons.prompt, lessons.ends)
    run = begun.run(lessons.rows, lessons.key, measure=measure)
    options: dict[str, Any] = dict(first_stage=first_stage, alpha=alpha, seed=training.seed)
    train_deer(target, drafter, begun.seen(lessons, ()).batch, run, **options)
    return begun.end(lambda: save_deer(drafter, begun.place), run)


def dflash(
    *,
    model: str,
    source: Source,
    training: Targeted,
    layers: Count,
    block: Block,
    mask: Size | None,
    inner: Size,
    read: Count,
    markov: Size,
    recurrent: Size,
    vocabulary: Size,
    start: Path | None,
    fade: Annotated[float, 0.1],
    recipe: Recipe,
) -> Found:
    """Train a DFlash block drafter on the target's hidden states; the result is drafters/block.

    With ``start`` it begins with another drafter's weights, sizes and tokens; ``recurrent`` then
    adds a memory.
    """
    begun = training.begun(model, "block", recipe)
    target = begun.target
    if start is not None:
        if given := [name for name in SIZES if name in recipe.chosen]:
            raise ValueError(f"start brings the drafter's own sizes, leave out {given[0]}")
        check_target(read_json(start / "config.json"), target.model, start)
        drafter = with_memory(load_dflash(start, torch.float32).to(target.device), recurrent)
    else:
        hidden = begun.mask(mask)
        layers_read(target, read)  # a mistake is told before rows are drawn, which takes minutes
    lessons = source.lessons(begun)
    if start is None:
        known = lessons.vocabulary(vocabulary)
        sizes = (layers, block + 1, hidden, read, inner, markov, recurrent)
        drafter = build_block(target, *sizes, known)
    measure = begun.tau("block", drafter, drafter, lessons.prompt, lessons.ends)
    run = begun.run(lessons.rows, lessons.key, measure=measure)
    draw = begun.seen(lessons, drafter.config.layers).batch
    train_block(target, drafter, draw, run, fade=fade, seed=training.seed)
    embeddings: Any = target.model.get_input_embeddings().weight
    return begun.end(lambda: save_dflash(drafter, begun.place, embeddings), run)


def diffusion(
    *,
    model: str,
    text: list[Path],
    training: Training,
    layers: Count,
    mask: Size | None,
    dim: Annotated[int, 4],
    heads: Count,
    recipe: Recipe,
) -> Found:
    """Train a diffusion language model in Dream's format with the model's tokens, on text alone:
    drafters/diffusion.
    """
    begun = training.begun(model, "diffuspec", recipe)
    tokenizer, seed = begun.tokenizer, training.seed
    made = build_model(Sizes(dim, layers, heads), tokenizer, seed)
    made = made.to(named_device(own_device(training.device)))
    drafter = FullAttention(made, begun.mask(mask), tokenizer.eos_token_id, shift=1)
    with one_first():
        stream = text_stream(tokenizer, training.out, text)
    run = training.run({**begun.facts, "data": key_of([stream.numpy().tobytes()])})
    train_diffusion(drafter, stream, run, batch=training.batch, seed=seed)
    return begun.end(lambda: save_dream(drafter, begun.place), run)


def proxy(*, model: str, text: list[Path], order: Count, least: Count, out: Path) -> Found:
    """Fit DiffuSpec's n-gram proxy to texts: one pass, no compiler; the result lies beside the
    diffusion drafter.
    """
    folder = beside(model, find_target(model))
    weights = weights_folder(folder)
    stream = text_stream(load_tokenizer(weights), writable(out), text)
    size = load_config(weights).get_text_config().vocab_size
    made = fit([stream.tolist()], size, order, least)
    file = writable(folder / "drafters" / KINDS["diffuspec"].place) / PROXY
    made.save(file)
    return {"kind": "proxy", "model": model, "steps": 1, "outputs": [str(file)]}
