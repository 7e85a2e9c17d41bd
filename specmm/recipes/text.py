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
from specmm.hf.drafters.files import check_target
from specmm.hf.drafting import KINDS
from specmm.hf.pretrained import (
    find_target,
    load_config,
    load_target,
    load_tokenizer,
    weights_folder,
)
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.recipe import Amount, Count, Found, Seed, Share, Size, beside
from specmm.recipes.source import Source
from specmm.recipes.training.deer import build_deer, train_deer
from specmm.recipes.training.dflash import build_block, layers_read, train_block, with_memory
from specmm.recipes.training.drawn_rows import Rows, frequent
from specmm.recipes.training.masked_diffusion import save_dream, train_diffusion
from specmm.recipes.training.ngram import fit
from specmm.recipes.training.small_qwen import Sizes, build_model
from specmm.recipes.training.texts import text_stream

SIZES = (
    "layers",
    "block",
    "mask",
    "inner",
    "read",
    "markov",
    "vocabulary",
)  # of a block drafter, which start brings
Block = Annotated[int, 2]  # drafts a round


def deer(
    *,
    model: str,
    source: Source,
    steps: Count,
    layers: Count,
    block: Block,
    mask: Size | None,
    inner: Size,
    batch: Count,
    lr: Amount,
    first_stage: Share,
    alpha: Annotated[float, 1],
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Train a DEER drafter: its own layers between the target's embedding and head; the result is
    drafters/deer.
    """
    place, target, tokenizer = _begin(model, "deer", replace)
    drafter = build_deer(
        target, layers, block, _mask(tokenizer, mask), tokenizer.eos_token_id, inner
    )
    lessons = source.lessons(Path(target.name), writable(out), seed, 1, lambda: target)
    tokens, learnt = lessons.tokens(block)
    options: dict[str, Any] = dict(first_stage=first_stage, alpha=alpha, seed=seed)
    steps = source.steps(lessons.rows, batch, steps)
    rows = Rows(target, tokens)
    train_deer(target, drafter, rows, learnt, out, steps=steps, batch=batch, lr=lr, **options)
    save_deer(drafter, place)
    return {"kind": "deer", "model": model, "steps": steps, "outputs": [str(place)]}


def dflash(
    *,
    model: str,
    source: Source,
    steps: Count,
    layers: Count,
    block: Block,
    mask: Size | None,
    inner: Size,
    read: Count,
    markov: Size,
    recurrent: Size,
    vocabulary: Size,
    batch: Count,
    lr: Amount,
    start: Path | None,
    fade: Annotated[float, 0.1],
    seed: Seed,
    replace: bool,
    out: Path,
    chosen: frozenset[str],
) -> Found:
    """Train a DFlash block drafter on the target's hidden states; the result is drafters/block.

    With ``start`` it begins with another drafter's weights, sizes and tokens; ``recurrent`` then
    adds a memory.
    """
    place, target, tokenizer = _begin(model, "block", replace)
    if start is not None:
        if given := [name for name in SIZES if name in chosen]:
            raise ValueError(f"start brings the drafter's own sizes, leave out {given[0]}")
        check_target(read_json(start / "config.json"), target.model, start)
        drafter = with_memory(load_dflash(start, torch.float32).to(target.device), recurrent)
    else:
        hidden = _mask(tokenizer, mask)
        layers_read(target, read)  # a mistake is told before rows are drawn, which takes minutes
    lessons = source.lessons(Path(target.name), writable(out), seed, 1, lambda: target)
    if start is None:
        known = frequent(lessons.said(), vocabulary) if vocabulary else None
        drafter = build_block(
            target, layers, block + 1, hidden, read, inner, markov, recurrent, known
        )
    tokens, learnt = lessons.tokens(drafter.config.block)
    rows = Rows(target, tokens, drafter.config.layers)
    options: dict[str, Any] = dict(fade=fade, seed=seed)
    steps = source.steps(lessons.rows, batch, steps)
    train_block(target, drafter, rows, learnt, out, steps=steps, batch=batch, lr=lr, **options)
    save_dflash(drafter, place, target.model.get_input_embeddings().weight)
    return {"kind": "block", "model": model, "steps": steps, "outputs": [str(place)]}


def diffusion(
    *,
    model: str,
    text: list[Path],
    steps: Count,
    layers: Count,
    mask: Size | None,
    dim: Annotated[int, 4],
    heads: Count,
    batch: Count,
    lr: Amount,
    seed: Seed,
    replace: bool,
    out: Path,
) -> Found:
    """Train a diffusion language model in Dream's format with the model's tokens, on text alone:
    drafters/diffusion.
    """
    folder = beside(model, find_target(model))
    place = place_of(folder, "diffuspec", replace)
    tokenizer = load_tokenizer(weights_folder(folder))
    made = build_model(Sizes(dim, layers, heads), tokenizer, seed)
    drafter = FullAttention(made, _mask(tokenizer, mask), tokenizer.eos_token_id, shift=1)
    stream = text_stream(tokenizer, writable(out), text)
    train_diffusion(drafter, stream, out, steps=steps, batch=batch, lr=lr, seed=seed)
    save_dream(drafter, place)
    return {"kind": "diffusion", "model": model, "steps": steps, "outputs": [str(place)]}


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


def _begin(model: str, kind: str, replace: bool) -> tuple[Path, Any, Any]:
    """Where the drafter goes, the target in float32 and its tokenizer."""
    folder = beside(model, find_target(model))
    place = place_of(folder, kind, replace)
    network, tokenizer = load_target(folder, torch.float32)
    return place, VLMTarget(network, Processor(), str(folder)), tokenizer


def place_of(folder: Path, kind: str, replace: bool) -> Path:
    """Where the drafter of method ``kind`` goes; raises ``ValueError`` where one is and stays."""
    place = folder / "drafters" / KINDS[kind].place
    if (place / "config.json").exists() and not replace:
        raise ValueError(f"{place} exists, give --set replace=true to train another in its place")
    writable(place.parent)
    return place


def _mask(tokenizer: Any, given: int | None) -> int:
    found = tokenizer.mask_token_id if given is None else given
    if found is None:
        raise ValueError(
            "tokenizer must have a mask token for a block drafter, got none; "
            "give one of its ids as mask"
        )
    return int(found)
