"""Training of a small diffusion language model in Dream's format, on text alone.

In half of the rows tokens are hidden anywhere, as in masked diffusion (weight one over the share);
in the other half the end is hidden, as in drafting. Source of the loss: LLaDA and Dream (arXiv
2502.09992, 2508.15487).

Shape letters: B rows, L tokens, T tokens of all texts, V vocabulary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.diffusion_drafters.assemble import PROXY
from specmm.diffusion_drafters.models.diffusion_lms import FullAttention
from specmm.diffusion_drafters.ngram import Gram, NGram
from specmm.hf.drafters.drafting import KINDS
from specmm.hf.drafters.files import HEAD
from specmm.hf.loading.pretrained import find_target, load_config, load_tokenizer, weights_folder
from specmm.loading.checkpoints import write_checkpoint
from specmm.loading.files import writable
from specmm.loading.hardware import named_device
from specmm.recipes.loop import MUON, Losses, Run, fit, one_first, own_device, share
from specmm.recipes.recipe import Count, Found, Recipe, Size, beside
from specmm.recipes.settings import Training
from specmm.recipes.source import key_of
from specmm.recipes.training.small_qwen import Sizes, build_model, compile_layers
from specmm.recipes.training.texts import text_stream, windows


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
    network = build_model(Sizes(dim, layers, heads), tokenizer, seed)
    network = network.to(named_device(own_device(training.device)))
    drafter = FullAttention(network, begun.mask(mask), tokenizer.eos_token_id, shift=1)
    with one_first():
        stream = text_stream(tokenizer, training.out, text)
    run = training.run({**begun.facts, "data": key_of([stream.numpy().tobytes()])})
    train_diffusion(drafter, stream, run, batch=training.batch, seed=seed)
    return begun.end(lambda: save_dream(drafter, begun.place), run)


def proxy(*, model: str, text: list[Path], order: Count, least: Count, out: Path) -> Found:
    """Fit DiffuSpec's n-gram proxy to texts, in one pass, and write it to the diffusion drafter."""
    folder = beside(model, find_target(model))
    weights = weights_folder(folder)
    stream = text_stream(load_tokenizer(weights), writable(out), text)
    size = load_config(weights).get_text_config().vocab_size
    ngram = fit_proxy([stream.tolist()], size, order, least)
    file = writable(folder / "drafters" / KINDS["diffuspec"].place) / PROXY
    ngram.save(file)
    return {"kind": "proxy", "model": model, "steps": 1, "outputs": [str(file)]}


LENGTH = 128  # tokens of a row
BLOCK = 16  # most tokens hidden at a row's end
LEAST = 0.1  # share hidden: its inverse is a weight


def train_diffusion(
    model: FullAttention, stream: Tensor, run: Run, *, batch: int = 16, seed: int = 0
) -> None:
    """Train ``model`` in place on ``stream`` [T]."""
    compile_layers(model.model.model.layers)

    def step(i: int) -> Losses:
        rows = share(windows(stream, i, batch, LENGTH, seed)).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            return {"loss": denoising_loss(model, rows, seed * 1_000_003 + i)}

    fit(model.model, step, run, muon=MUON * run.lr)
    model.model.eval()


def denoising_loss(model: FullAttention, rows: Tensor, seed: int) -> Tensor:
    """Cross-entropy (nats) of the hidden tokens of ``rows`` [B, L] by the rows that score them."""
    hidden, weights = (x.to(rows.device) for x in hide(len(rows), rows.shape[1], seed))
    states = model.states(rows.masked_fill(hidden, model.mask))
    tokens = rows[:, model.shift :]
    weights = weights[:, model.shift :]
    scored = weights > 0
    logits = model.head(states[:, : rows.shape[1] - model.shift][scored]).float()
    losses = F.cross_entropy(logits, tokens[scored], reduction="none")
    return (losses * weights[scored]).sum() / weights.sum()


def hide(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """The mask of hidden tokens [B, L] and their weights; the first token is never hidden."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, 1, generator=generator).clamp(min=LEAST)
    anywhere = torch.rand(rows, length, generator=generator) < share
    ends = torch.randint(1, min(BLOCK, length - 1) + 1, (rows, 1), generator=generator)
    order = torch.arange(length)
    drafting = torch.arange(rows)[:, None] % 2 == 0
    hidden = torch.where(drafting, order >= length - ends, anywhere) & (order > 0)
    return hidden, hidden / torch.where(drafting, ends / length, share)


def save_dream(model: FullAttention, folder: str | Path) -> None:
    """Write Dream's format (bf16): its names and config, without the head if it is tied."""
    state: dict[str, Any] = model.model.state_dict()
    if model.model.config.tie_word_embeddings:
        state.pop(HEAD)
    facts = json.loads(model.model.config.to_json_string(use_diff=False))
    facts |= {"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": model.mask}
    write_checkpoint(state, facts | {"eos_token_id": model.end}, folder, torch.bfloat16)


def fit_proxy(
    texts: Iterable[Sequence[int]], vocabulary: int, order: int = 3, least: int = 1
) -> NGram:
    """The n-gram model of ``order`` of ``texts`` (token ids below ``vocabulary``).

    N-grams of two and more tokens seen fewer than ``least`` times are dropped, for size. Raises
    ``ValueError`` for ids outside the vocabulary and for sizes below 1.
    """
    counts: Counter[Gram] = Counter()
    for text in texts:
        ids = list(text)
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"tokens must be in [0, {vocabulary}), got {min(ids)} to {max(ids)}")
        for n in range(1, order + 1):
            counts.update(zip(*(ids[i:] for i in range(n)), strict=False))
    return NGram(order, vocabulary, {g: c for g, c in counts.items() if len(g) == 1 or c >= least})
