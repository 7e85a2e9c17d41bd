"""``specmm train``: tokenizer, target and drafters of a LlamaGen on emoji, as ``pocket/llamagen`` was made.

Every run keeps ``checkpoint.pt`` and ``loss.csv`` in its folder and resumes from there.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.generate import Json
from specmm.cli.output import emit, say, stdout_reserved, writable

app = typer.Typer(no_args_is_help=True, help="Train a tokenizer, a target, a drafter.", rich_markup_mode=None)
EMOJI = Path("~/.cache/specmm/emoji")
KINDS = ("block", "eagle")

Data = Annotated[Path, typer.Option(help="Folder of the emoji; downloaded from npm and rasterised when empty.")]
Out = Annotated[Path, typer.Option(help="Folder of checkpoint, loss curve and result.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps in all.")]
Batch = Annotated[int, typer.Option(min=1, help="Pictures a step.")]
Seed = Annotated[int, typer.Option(min=0, help="Of initialisation and batches.")]


@app.command()
def tokenizer(
    data: Data = EMOJI,
    steps: Steps = 6000,
    batch: Batch = 32,
    seed: Seed = 0,
    codes: Annotated[int, typer.Option(min=2, help="Codebook size.")] = 1024,
    out: Out = Path("runs/vq"),
    as_json: Json = False,
) -> None:
    """Train the VQ tokenizer; the result is OUT/model.safetensors."""
    writable(out)
    with stdout_reserved():
        import torch
        import torch.nn.functional as F

        from specmm.image_ar.tokens.loading import save_vq
        from specmm.image_ar.tokens.train.tokenizer import train_tokenizer
        from specmm.image_ar.tokens.vq import VQConfig

        images = torch.from_numpy(_emoji(data).images)
        config = VQConfig(codes, 8, 32, (1, 2, 2), 1, 64)
        model = train_tokenizer(images, config, out, steps=steps, batch=batch, seed=seed)
        rows = model.quantize.embedding.weight.data
        rows.copy_(F.normalize(rows, dim=-1))  # the same codes; LANTERN's distances are those of the rows as stored
        save_vq(model, out)
    _done({"kind": "tokenizer", "steps": steps, "outputs": [str(out)]}, as_json)


@app.command()
def target(
    tokenizer: Annotated[Path, typer.Option(help="Folder of the trained tokenizer.")] = Path("runs/vq"),
    data: Data = EMOJI,
    steps: Steps = 6000,
    batch: Batch = 32,
    seed: Seed = 0,
    dim: Annotated[int, typer.Option(min=4, help="Width.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers: deep and narrow makes drafting pay.")] = 18,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    out: Out = Path("runs/target"),
    as_json: Json = False,
) -> None:
    """Train the transformer on the tokenizer's tokens; the result is a whole model in OUT/model."""
    writable(out)
    with stdout_reserved():
        import torch

        from specmm.image_ar.pipeline import ImagePipeline
        from specmm.image_ar.settings import Settings
        from specmm.image_ar.tokens.gpt import GPTConfig
        from specmm.image_ar.tokens.loading import load_vq
        from specmm.image_ar.tokens.train.target import train_target

        vq, pictures = load_vq(tokenizer), _emoji(data)
        tokens = _tokens(vq, pictures.images, out)
        sizes: dict[str, Any] = dict(dim=dim, n_layer=layers, n_head=heads, num_classes=len(pictures.classes))
        config = GPTConfig(vocab_size=vq.config.codebook_size, block_size=tokens.shape[-1], **sizes)
        labels = torch.from_numpy(pictures.labels)
        model = train_target(tokens, labels, config, out, steps=steps, batch=batch, seed=seed)
        pipe = ImagePipeline(model.eval(), vq, {}, Settings(classes=tuple(pictures.classes)))
        pipe.save_pretrained(out / "model", torch.bfloat16)
    _done({"kind": "target", "steps": steps, "outputs": [str(out / "model")]}, as_json)


@app.command()
def drafter(
    model: Annotated[str, typer.Argument(help="Folder of the target's model; the drafter is added to it.")],
    kind: Annotated[str, typer.Option(help="block (one pass drafts all levels) or eagle.")] = "block",
    data: Data = EMOJI,
    steps: Steps = 3000,
    batch: Batch = 16,
    seed: Seed = 0,
    levels: Annotated[int, typer.Option(min=1, help="Tokens a block drafter drafts.")] = 8,
    replace: Annotated[bool, typer.Option(help="Replace a drafter of this kind.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of checkpoint and loss curve; runs/KIND if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a drafter for a model; the result is MODEL/drafters/KIND."""
    from specmm import zoo
    from specmm.registry import unknown

    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    result = zoo.find(model) / "drafters" / kind
    if result.exists() and not replace:
        raise ValueError(f"{result} exists, give --replace to train another in its place")
    writable(result.parent)
    folder = writable(out or Path("runs") / kind)
    with stdout_reserved():
        _train_drafter(zoo.find(model), kind, _emoji(data), folder, steps=steps, batch=batch, seed=seed, levels=levels)
    _done({"kind": kind, "model": model, "steps": steps, "outputs": [str(result)]}, as_json)


def _train_drafter(
    model: Path, kind: str, pictures: Any, out: Path, *, steps: int, batch: int, seed: int, levels: int
) -> None:
    import torch

    from specmm.image_ar.tokens.drafters.files import save_drafters
    from specmm.image_ar.tokens.loading import load_gpt, load_vq

    target, vq = load_gpt(model / "transformer"), load_vq(model / "vq")
    tokens, labels = _tokens(vq, pictures.images, out), torch.from_numpy(pictures.labels)
    if kind == "block":
        from specmm.image_ar.tokens.drafters.block import BlockConfig
        from specmm.image_ar.tokens.train.block import train_block

        config = BlockConfig(levels, 2, target.config)
        head: Any = train_block(target, tokens, labels, config, out, steps=steps, batch=batch, seed=seed)
    else:
        from specmm.image_ar.tokens.train.eagle import train_eagle

        head = train_eagle(target, tokens, labels, out, steps=steps, batch=batch, seed=seed)
    save_drafters({kind: head}, model / "drafters", target, torch.bfloat16)


def _emoji(folder: Path) -> Any:
    """The training split; raises ``ValueError`` saying what is missing to make it."""
    from specmm.zoo.emoji import load

    folder = folder.expanduser()
    try:
        return load(folder)
    except ModuleNotFoundError as error:
        raise ValueError(f"rasterising emoji needs {error.name}, run: pip install 'specmm[train]'") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"npm could not fetch the emoji ({error.stderr or error}), fill {folder} by hand") from error


def _tokens(vq: Any, images: Any, out: Path) -> Any:
    """Tokens [M, 2, T] of the pictures and their mirror images, kept in ``out`` for the next run."""
    import torch

    from specmm.image_ar.tokens.train.target import encode_pictures

    weights = b"".join(v.detach().float().numpy().tobytes() for v in vq.state_dict().values())
    key = hashlib.sha256(weights + images.tobytes()).hexdigest()
    file = out / "tokens.pt"
    if file.exists():
        kept = torch.load(file, weights_only=True)
        if kept["key"] == key:
            return kept["tokens"]
    tokens = encode_pictures(vq, torch.from_numpy(images))
    torch.save({"key": key, "tokens": tokens}, file)
    return tokens


def _done(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(found)
    else:
        say(f"trained {found['kind']}, {found['steps']} steps: {', '.join(found['outputs'])}")
