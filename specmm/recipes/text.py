"""Drafters of text models (``deer``, ``dflash``, ``diffusion``, ``proxy``), written to the model's
``drafters/``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
from specmm.recipes.training.deer import build_deer, train_deer
from specmm.recipes.training.dflash import build_block, layers_read, train_block, with_memory
from specmm.recipes.training.drawn_rows import Rows, drawn_chats, drawn_rows, frequent
from specmm.recipes.training.masked_diffusion import save_dream, train_diffusion
from specmm.recipes.training.ngram import fit
from specmm.recipes.training.small_qwen import LENGTH, Sizes, build_model
from specmm.recipes.training.texts import given_texts, read_files, token_stream, windows
from specmm.text.pipeline import TextPipeline

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
    text: list[Path],
    steps: Count,
    rows: Count,
    drawn: Share,
    chats: bool,
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
    data = Rows(
        target,
        text_rows(target, tokenizer, text, rows, None if chats else drawn, writable(out), seed),
    )
    options: dict[str, Any] = dict(first_stage=first_stage, alpha=alpha, seed=seed)
    train_deer(target, drafter, data, out, steps=steps, batch=batch, lr=lr, **options)
    save_deer(drafter, place)
    return {"kind": "deer", "model": model, "steps": steps, "outputs": [str(place)]}


def dflash(
    *,
    model: str,
    text: list[Path],
    steps: Count,
    rows: Count,
    drawn: Share,
    chats: bool,
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
    tokens = text_rows(target, tokenizer, text, rows, None if chats else drawn, writable(out), seed)
    if start is None:
        known = frequent(tokens, vocabulary) if vocabulary else None
        drafter = build_block(
            target, layers, block + 1, hidden, read, inner, markov, recurrent, known
        )
    data = Rows(target, tokens, drafter.config.layers)
    train_block(target, drafter, data, out, steps=steps, batch=batch, lr=lr, fade=fade, seed=seed)
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
    return place, VLMTarget(network, Processor(), model), tokenizer


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


def text_rows(
    target: Any,
    tokenizer: Any,
    text: list[Path],
    count: int,
    drawn: float | None,
    out: Path,
    seed: int,
) -> Any:
    """Rows [R, 256] of the text, a share of them continued by the target after 64 tokens, half
    greedily; without ``drawn`` conversations that the target makes up.
    """
    if drawn is None:
        if text:
            raise ValueError("give text or chats, not both")
        return drawn_chats(
            TextPipeline.from_pretrained(target.name, device="cpu"), count, LENGTH, out, seed
        )
    rows = windows(text_stream(tokenizer, out, text), 0, count, LENGTH, seed)
    own = round(drawn * count)
    if not own:
        return rows
    return torch.cat(
        [drawn_rows(target, rows[:own, : LENGTH // 4], LENGTH, (0.0, 1.0), out, seed), rows[own:]]
    )


def text_stream(
    tokenizer: Any, out: Path, given: Sequence[Path] = (), held_out: bool = False
) -> Any:
    """The tokens [T] of the ``given`` texts, or of one side of the split of source code; kept in
    ``out`` for later use.

    Raises ``ValueError`` for a given place without text.
    """
    texts = given_texts(given) if given else read_files(held_out)
    key = hashlib.sha256(
        repr((sorted(tokenizer.get_vocab().items()), list(texts.items()))).encode()
    ).hexdigest()
    file = out / f"{'held-out' if held_out else 'tokens'}.pt"
    if file.exists() and (kept := torch.load(file, weights_only=True))["key"] == key:
        return kept["stream"]
    stream = token_stream(texts.values(), tokenizer)
    torch.save({"key": key, "stream": stream}, file)
    return stream
