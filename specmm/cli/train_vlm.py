"""``specmm train llava``: a small LLaVA on easy-VQA and scenes of emoji, as ``pocket/llava`` was made.

Other sizes and seeds make the small models that draft for it or answer beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.generate import Json
from specmm.cli.output import emit, say, stdout_reserved, writable

EMOJI = Path("~/.cache/specmm/emoji")


def llava(
    data: Annotated[Path, typer.Option(help="Folder of the emoji; downloaded from npm when empty.")] = EMOJI,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of the whole model.")] = 1600,
    tower_steps: Annotated[int, typer.Option(min=0, help="Steps the vision tower learns alone before.")] = 700,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a step, twice as many for the tower alone.")] = 32,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of initialisation and data.")] = 0,
    dim: Annotated[int, typer.Option(min=4, help="Width of the language model.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: deep and narrow makes drafting pay.")] = 18,
    heads: Annotated[int, typer.Option(min=1, help="Its attention heads.")] = 4,
    tower_dim: Annotated[int, typer.Option(min=32, help="Width of the vision tower, a multiple of 32.")] = 192,
    tower_layers: Annotated[int, typer.Option(min=1, help="Layers of the vision tower.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder of checkpoints and loss curves; the model is OUT/model.")] = Path(
        "runs/llava"
    ),
    as_json: Json = False,
) -> None:
    """Train a small LLaVA that transformers loads as it is."""
    writable(out)
    with stdout_reserved():
        from specmm.vlm.train.target import Sizes

        sizes = Sizes(dim, layers, heads, tower_dim, tower_layers)
        _train(data.expanduser(), out, sizes, (tower_steps, steps), batch, lr, seed)
    if as_json:
        emit({"kind": "llava", "steps": steps, "outputs": [str(out / "model")]})
    else:
        say(f"trained a LLaVA, {steps} steps: {out / 'model'}")


def _train(data: Path, out: Path, sizes: Any, steps: tuple[int, int], batch: int, lr: float, seed: int) -> None:
    from transformers import AutoProcessor

    from specmm.vlm.data.packing import Encoder
    from specmm.vlm.data.scenes import R
    from specmm.vlm.data.stream import learn_tokenizer
    from specmm.vlm.data.tokenizer import build_processor
    from specmm.vlm.train.target import build_model, save_model, train_target, train_tower

    world, held_out = open_world(data, "train"), open_world(data, "test")
    if not (out / "processor").exists():  # a resumed run goes on with the same tokens
        build_processor(learn_tokenizer(world), R, sizes.patch).save_pretrained(out / "processor")
    processor = AutoProcessor.from_pretrained(out / "processor")
    encoder = Encoder(processor.tokenizer, sizes.image_tokens)
    model = build_model(sizes, len(processor.tokenizer), encoder, seed)
    train_tower(model, world, out / "tower", steps=steps[0], batch=2 * batch, lr=lr, seed=seed)
    train_target(model, encoder, world, held_out, out / "target", steps=steps[1], batch=batch, lr=lr, seed=seed)
    save_model(model, processor, out / "model")


def open_world(data: Path, split: str) -> Any:
    """Scenes and easy-VQA of a split; raises ``ValueError`` naming the package that is missing."""
    from specmm.vlm.data.stream import load_world

    try:
        return load_world(data, split)
    except ModuleNotFoundError as error:
        raise ValueError(f"drawing emoji needs {error.name}, run: pip install 'specmm[train]'") from error
