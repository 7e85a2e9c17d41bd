"""``specmm train coder``: a small language model of Python source code, as ``pocket/coder`` was made.

Other sizes with its tokenizer make a small autoregressive model to compare drafters with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.data import Seed, done
from specmm.cli.generate import Json
from specmm.cli.output import stdout_reserved, writable

Rows = Annotated[int, typer.Option(min=1, help="Rows of 256 tokens a step.")]


def coder(
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps in all.")] = 3000,
    batch: Rows = 8,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of what Muon does not take.")] = 6e-3,
    seed: Seed = 0,
    dim: Annotated[int, typer.Option(min=4, help="Width.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers: deep and narrow makes drafting pay.")] = 20,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    vocabulary: Annotated[int, typer.Option(min=300, help="Tokens to learn.")] = 4096,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of a tokenizer to use instead.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve; the model is OUT/model.")] = Path(
        "runs/coder"
    ),
    as_json: Json = False,
) -> None:
    """Train a Qwen2 on the Python standard library and installed packages; transformers loads it as it is."""
    writable(out)
    with stdout_reserved():
        import torch

        from specmm.diffusion_drafters.train.target import Sizes, build_model, evaluate, train_target

        sizes = Sizes(dim, layers, heads)
        words = _tokenizer(out, tokenizer, vocabulary)
        learnt, held_out = (text_stream(words, out, held_out=side) for side in (False, True))
        model = build_model(sizes, words, seed)
        train_target(model, learnt, held_out, out, steps=steps, batch=batch, lr=lr, seed=seed)
        loss = float(evaluate(model, held_out, 128))
        model.eval().to(torch.bfloat16).save_pretrained(out / "model")
        words.save_pretrained(out / "model")
    found = {"kind": "coder", "steps": steps, "held_out_loss": loss, "train_tokens": len(learnt)}
    done({**found, "outputs": [str(out / "model")]}, as_json)


def _tokenizer(out: Path, given: Path | None, vocabulary: int) -> Any:
    """The tokenizer in ``given``, or that of an earlier run in ``out``, or one learnt now."""
    from specmm.diffusion_drafters.data.code import build_tokenizer, read_files
    from specmm.hf.pretrained import load_tokenizer

    own = out / "tokenizer"
    if given is None and not own.exists():  # a resumed run goes on with the same tokens
        build_tokenizer(read_files(False).values(), vocabulary).save_pretrained(own)
    return load_tokenizer(given or own)


def text_stream(tokenizer: Any, out: Path, given: Sequence[Path] = (), held_out: bool = False) -> Any:
    """The tokens [T] of the ``given`` texts, or of one side of the split of source code; kept in ``out`` for later use.

    Raises ``ValueError`` for a given place without text.
    """
    import hashlib

    import torch

    from specmm.diffusion_drafters.data.code import given_texts, read_files, token_stream

    texts = given_texts(given) if given else read_files(held_out)
    key = hashlib.sha256(repr((sorted(tokenizer.get_vocab().items()), list(texts.items()))).encode()).hexdigest()
    file = out / f"{'held-out' if held_out else 'tokens'}.pt"
    if file.exists() and (kept := torch.load(file, weights_only=True))["key"] == key:
        return kept["stream"]
    stream = token_stream(texts.values(), tokenizer)
    torch.save({"key": key, "stream": stream}, file)
    return stream
