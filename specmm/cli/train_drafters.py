"""``specmm train deer | dflash | diffusion | proxy``: drafters of a text model, written to its ``drafters/``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.data import Seed, done
from specmm.cli.generate import Json
from specmm.cli.output import beside, stdout_reserved, writable
from specmm.cli.train_coder import text_stream

Model = Annotated[str, typer.Argument(help="Folder of the target's model; the drafter is added to it.")]
Text = Annotated[
    list[Path],
    typer.Option(help="File or folder of texts to learn from, may be repeated; else Python source as for train coder."),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps in all.")]
Rows = Annotated[int, typer.Option(min=1, help="Rows of text to learn from.")]
Drawn = Annotated[float, typer.Option(min=0, max=1, help="Share of them that the target itself continues.")]
Chats = Annotated[bool, typer.Option(help="Learn from conversations that the target makes up, in place of text.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the drafter.")]
Block = Annotated[int, typer.Option(min=2, help="Drafts a round.")]
Mask = Annotated[int | None, typer.Option(min=0, help="Id of the mask, where the tokenizer names none.")]
Inner = Annotated[int, typer.Option(min=0, help="Width of its feed-forward layers, 0 for the target's.")]
Batch = Annotated[int, typer.Option(min=1, help="Rows a step.")]
Rate = Annotated[float, typer.Option(min=0, help="Learning rate.")]
Replace = Annotated[bool, typer.Option(help="Replace the model's drafter of this kind.")]
SIZES = ("layers", "block", "mask", "inner", "read", "markov", "vocabulary")  # of a block drafter, which --start brings


def deer(
    model: Model,
    text: Text = [],  # noqa: B006  typer copies it
    steps: Steps = 1500,
    rows: Rows = 1536,
    drawn: Drawn = 0.75,
    chats: Chats = False,
    layers: Layers = 4,
    block: Block = 8,
    mask: Mask = None,
    inner: Inner = 0,
    batch: Batch = 8,
    lr: Rate = 2e-3,
    first_stage: Annotated[float, typer.Option(min=0, max=1, help="Share of the steps in stage 1.")] = 0.25,
    alpha: Annotated[float, typer.Option(min=1, help="How much nearer drafts count more in stage 2.")] = 1.02,
    seed: Seed = 0,
    replace: Replace = False,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve.")] = Path("runs/deer"),
    as_json: Json = False,
) -> None:
    """Train a DEER drafter: its own layers between the target's embedding and head; the result is drafters/deer."""
    with stdout_reserved():
        from specmm.diffusion_drafters.models.causal import save_deer
        from specmm.diffusion_drafters.train.deer import build_deer, train_deer
        from specmm.diffusion_drafters.train.rows import Rows

        place, target, tokenizer = _begin(model, "deer", replace)
        drafter = build_deer(target, layers, block, _mask(tokenizer, mask), tokenizer.eos_token_id, inner)
        data = Rows(target, _rows(target, tokenizer, text, rows, None if chats else drawn, writable(out), seed))
        options: dict[str, Any] = dict(first_stage=first_stage, alpha=alpha, seed=seed)
        train_deer(target, drafter, data, out, steps=steps, batch=batch, lr=lr, **options)
        save_deer(drafter, place)
    done({"kind": "deer", "model": model, "steps": steps, "outputs": [str(place)]}, as_json)


def dflash(
    context: typer.Context,
    model: Model,
    text: Text = [],  # noqa: B006
    steps: Steps = 1500,
    rows: Rows = 1536,
    drawn: Drawn = 0.75,
    chats: Chats = False,
    layers: Layers = 2,
    block: Block = 8,
    mask: Mask = None,
    inner: Inner = 0,
    read: Annotated[int, typer.Option(min=1, help="Layers of the target that it reads.")] = 4,
    markov: Annotated[int, typer.Option(min=0, help="Rank of its table of pairs of tokens, 0 for none.")] = 0,
    recurrent: Annotated[int, typer.Option(min=0, help="Size of its memory along a block, 0 for none.")] = 0,
    vocabulary: Annotated[int, typer.Option(min=0, help="Most frequent tokens that it drafts, 0 for all.")] = 0,
    batch: Batch = 8,
    lr: Rate = 2e-3,
    start: Annotated[Path | None, typer.Option(help="Drafter it begins with, sizes and all.")] = None,
    fade: Annotated[float, typer.Option(min=0.1, help="Drafts over which a draft's weight falls to 1/e.")] = 4.0,
    seed: Seed = 0,
    replace: Replace = False,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve.")] = Path("runs/dflash"),
    as_json: Json = False,
) -> None:
    """Train a DFlash block drafter on the target's hidden states; the result is drafters/block.

    With --start it begins with another drafter's weights, sizes and tokens; --recurrent then adds a memory.
    """
    with stdout_reserved():
        import torch

        from specmm.checkpoints import read_json
        from specmm.diffusion_drafters.models.causal import check_target
        from specmm.diffusion_drafters.models.dflash import load_dflash, save_dflash
        from specmm.diffusion_drafters.train.block import build_block, layers_read, train_block, with_memory
        from specmm.diffusion_drafters.train.rows import Rows, frequent

        place, target, tokenizer = _begin(model, "block", replace)
        if start is not None:
            sources = {name: context.get_parameter_source(name) for name in SIZES}
            if given := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
                raise ValueError(f"--start brings the drafter's own sizes, leave out --{given[0]}")
            check_target(read_json(start / "config.json"), target.model, start)
            drafter = with_memory(load_dflash(start, torch.float32).to(target.device), recurrent)
        else:
            hidden = _mask(tokenizer, mask)
            layers_read(target, read)  # a mistake is told before rows are drawn, which takes minutes
        tokens = _rows(target, tokenizer, text, rows, None if chats else drawn, writable(out), seed)
        if start is None:
            known = frequent(tokens, vocabulary) if vocabulary else None
            drafter = build_block(target, layers, block + 1, hidden, read, inner, markov, recurrent, known)
        data = Rows(target, tokens, drafter.config.layers)
        train_block(target, drafter, data, out, steps=steps, batch=batch, lr=lr, fade=fade, seed=seed)
        save_dflash(drafter, place, target.model.get_input_embeddings().weight)
    done({"kind": "block", "model": model, "steps": steps, "outputs": [str(place)]}, as_json)


def diffusion(
    model: Model,
    text: Text = [],  # noqa: B006
    steps: Steps = 3000,
    layers: Layers = 6,
    mask: Mask = None,
    dim: Annotated[int, typer.Option(min=4, help="Width.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Rows of 128 tokens a step.")] = 16,
    lr: Rate = 2e-3,
    seed: Seed = 0,
    replace: Replace = False,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve.")] = Path("runs/diffusion"),
    as_json: Json = False,
) -> None:
    """Train a diffusion language model in Dream's format with the model's tokens, on text alone: drafters/diffusion."""
    with stdout_reserved():
        from specmm.diffusion_drafters.models.bidirectional import FullAttention
        from specmm.diffusion_drafters.train.diffusion import save_dream, train_diffusion
        from specmm.diffusion_drafters.train.target import Sizes, build_model
        from specmm.hf.loading import find_target, weights_folder
        from specmm.hf.pretrained import load_tokenizer

        folder = beside(model, find_target(model))
        place = _place(folder, "diffuspec", replace)
        tokenizer = load_tokenizer(weights_folder(folder))
        made = build_model(Sizes(dim, layers, heads), tokenizer, seed)
        drafter = FullAttention(made, _mask(tokenizer, mask), tokenizer.eos_token_id, shift=1)
        stream = text_stream(tokenizer, writable(out), text)
        train_diffusion(drafter, stream, out, steps=steps, batch=batch, lr=lr, seed=seed)
        save_dream(drafter, place)
    done({"kind": "diffusion", "model": model, "steps": steps, "outputs": [str(place)]}, as_json)


def proxy(
    model: Model,
    text: Text = [],  # noqa: B006
    order: Annotated[int, typer.Option(min=1, help="Tokens of the longest n-grams.")] = 3,
    least: Annotated[int, typer.Option(min=1, help="Drop n-grams seen fewer times.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder that keeps the texts' tokens.")] = Path("runs/proxy"),
    as_json: Json = False,
) -> None:
    """Fit DiffuSpec's n-gram proxy to texts: one pass, no compiler; the result lies beside the diffusion drafter."""
    with stdout_reserved():
        from specmm.diffusion_drafters.diffuspec.ngram import fit
        from specmm.diffusion_drafters.loading import PROXY
        from specmm.hf.drafting import KINDS
        from specmm.hf.loading import find_target, weights_folder
        from specmm.hf.pretrained import load_config, load_tokenizer

        folder = beside(model, find_target(model))
        weights = weights_folder(folder)
        stream = text_stream(load_tokenizer(weights), writable(out), text)
        size = load_config(weights).get_text_config().vocab_size
        made = fit([stream.tolist()], size, order, least)
        file = writable(folder / "drafters" / KINDS["diffuspec"].place) / PROXY
        made.save(file)
    done({"kind": "proxy", "model": model, "steps": 1, "outputs": [str(file)]}, as_json)


def _begin(model: str, kind: str, replace: bool) -> tuple[Path, Any, Any]:
    """Where the drafter goes, the target in float32 and its tokenizer."""
    import torch

    from specmm.hf.loading import find_target, load_target
    from specmm.hf.target import VLMTarget
    from specmm.processors import Processor

    folder = beside(model, find_target(model))
    place = _place(folder, kind, replace)
    network, tokenizer = load_target(folder, torch.float32)
    return place, VLMTarget(network, Processor(), model), tokenizer


def _place(folder: Path, kind: str, replace: bool) -> Path:
    from specmm.hf.drafting import KINDS

    place = folder / "drafters" / KINDS[kind].place
    if (place / "config.json").exists() and not replace:
        raise ValueError(f"{place} exists, give --replace to train another in its place")
    writable(place.parent)
    return place


def _mask(tokenizer: Any, given: int | None) -> int:
    found = tokenizer.mask_token_id if given is None else given
    if found is None:
        raise ValueError(
            "tokenizer must have a mask token for a block drafter, got none; give one of its ids with --mask"
        )
    return int(found)


def _rows(target: Any, tokenizer: Any, text: list[Path], count: int, drawn: float | None, out: Path, seed: int) -> Any:
    """Rows [R, 256] of the text, a share of them continued by the target behind 64 tokens, half greedily; without
    ``drawn`` conversations that the target makes up.
    """
    import torch

    from specmm.diffusion_drafters.data.code import windows
    from specmm.diffusion_drafters.train.chats import drawn_chats
    from specmm.diffusion_drafters.train.rows import drawn_rows
    from specmm.diffusion_drafters.train.target import LENGTH
    from specmm.text.pipeline import TextPipeline

    if drawn is None:
        if text:
            raise ValueError("give --text or --chats, not both")
        return drawn_chats(TextPipeline.from_pretrained(target.name), count, LENGTH, out, seed)
    rows = windows(text_stream(tokenizer, out, text), 0, count, LENGTH, seed)
    own = round(drawn * count)
    if not own:
        return rows
    return torch.cat([drawn_rows(target, rows[:own, : LENGTH // 4], LENGTH, (0.0, 1.0), out, seed), rows[own:]])
