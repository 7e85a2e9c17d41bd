"""``specmm train llava``: a small LLaVA on easy-VQA and scenes of emoji, as ``pocket/llava`` was made.

Other sizes and seeds make the small models that draft for it or answer beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.data import EMOJI, Data, Seed, done, world
from specmm.cli.generate import Json
from specmm.cli.output import beside, stdout_reserved, writable, write_text

TOGETHER = 0.15  # of the learning rate once the tower learns, too: at 0.3 the loss doubled in fifty steps


def llava(
    data: Data = EMOJI,
    steps: Annotated[int, typer.Option(min=1, help="Steps the language model then learns alone.")] = 2200,
    together_steps: Annotated[int, typer.Option(min=0, help="Steps of all parts at a lower rate.")] = 4000,
    tower_steps: Annotated[int, typer.Option(min=0, help="Steps the vision tower learns alone before.")] = 2400,
    align_steps: Annotated[int, typer.Option(min=0, help="Steps the projector learns alone after it.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a step, four times as many for the tower alone.")] = 16,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate; half of it for the tower alone.")] = 2e-3,
    seed: Seed = 0,
    dim: Annotated[int, typer.Option(min=4, help="Width of the language model.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Its layers: deep and narrow makes drafting pay.")] = 18,
    heads: Annotated[int, typer.Option(min=1, help="Its attention heads.")] = 4,
    tower_dim: Annotated[int, typer.Option(min=32, help="Width of the vision tower, a multiple of 32.")] = 192,
    tower_layers: Annotated[int, typer.Option(min=1, help="Layers of the vision tower.")] = 4,
    drafts_for: Annotated[
        Path | None, typer.Option(help="Folder of a larger model: this one becomes its drafters/vlm.")
    ] = None,
    expert_of: Annotated[
        Path | None, typer.Option(help="Folder of a larger model: this one becomes its drafters/experts/SEED.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of checkpoints and loss curves, and of the model (OUT/model) if it stands alone."),
    ] = Path("runs/llava"),
    as_json: Json = False,
) -> None:
    """Train a small LLaVA that transformers loads as it is."""
    writable(out)
    place = _place(out, drafts_for, expert_of, seed)
    with stdout_reserved():
        from specmm.vlm.train.target import Sizes

        sizes = Sizes(dim, layers, heads, tower_dim, tower_layers)
        _check_same(out, {**vars(sizes), "seed": seed, "model": str(place)})
        _train(data, out, place, sizes, (tower_steps, align_steps, steps, together_steps), batch, lr, seed)
        if expert_of is not None:
            from specmm.vlm.data.opinions import PROMPTS

            PROMPTS.save(place.parent)
    done({"kind": "llava", "steps": steps, "outputs": [str(place)]}, as_json)


def _place(out: Path, drafts_for: Path | None, expert_of: Path | None, seed: int) -> Path:
    """Where the trained model goes."""
    if drafts_for is not None and expert_of is not None:
        raise ValueError(f"give --drafts-for or --expert-of, not both, got {drafts_for} and {expert_of}")
    larger = drafts_for or expert_of
    if larger is None:
        return out / "model"
    from specmm.hf.drafting import KINDS

    if not (larger / "config.json").is_file():
        raise ValueError(f"{larger} must hold a model (config.json), train that one first")
    place = larger / "drafters" / (KINDS["vlm-draft"].place if drafts_for else f"{KINDS['verdict'].place}/{seed}")
    if (place / "config.json").exists():
        raise ValueError(f"{place} holds a model already, remove it or give another --seed")
    return place


def _check_same(out: Path, run: dict[str, Any]) -> None:
    """Note in ``out`` what is trained there; a folder in which something else was begun cannot be gone on with."""
    note = out / "run.json"
    if not note.exists():
        write_text(note, json.dumps(run, indent=1) + "\n")
    elif (found := json.loads(note.read_text())) != run:
        other = ", ".join(f"{k} {found.get(k)}" for k in run if found.get(k) != run[k])
        raise ValueError(f"{out} holds the training of another model ({other}), give this one its own --out")


def _train(
    data: Path, out: Path, place: Path, sizes: Any, steps: tuple[int, int, int, int], batch: int, lr: float, seed: int
) -> None:
    from specmm.hf.pretrained import load_processor
    from specmm.vlm.data.packing import Encoder
    from specmm.vlm.data.scenes import R
    from specmm.vlm.data.stream import learn_tokenizer
    from specmm.vlm.data.tokenizer import build_processor
    from specmm.vlm.train.align import train_projector
    from specmm.vlm.train.target import build_model, save_model, train_target, train_tower

    training, held_out = world(data, "train"), world(data, "test")
    if not (out / "processor").exists():  # a resumed run goes on with the same tokens
        build_processor(learn_tokenizer(training), R, sizes.patch).save_pretrained(out / "processor")
    processor = load_processor(out / "processor")
    encoder = Encoder(processor.tokenizer, sizes.image_tokens)
    model = build_model(sizes, len(processor.tokenizer), encoder, seed)
    train_tower(model, training, held_out, out / "tower", steps=steps[0], batch=4 * batch, lr=lr / 2, seed=seed)
    train_projector(model, processor.tokenizer, training, out / "align", steps=steps[1], batch=4 * batch, seed=seed)
    options: dict[str, Any] = dict(batch=batch, seed=seed)
    train_target(model, encoder, training, held_out, out / "target", steps=steps[2], lr=lr, **options)
    train_target(
        model, encoder, training, held_out, out / "together", steps=steps[3], lr=TOGETHER * lr, vision=True, **options
    )
    save_model(model, processor, place)


def projector(
    data: Data = EMOJI,
    align_steps: Annotated[int, typer.Option(min=0, help="Steps it first learns the words for patches.")] = 600,
    steps: Annotated[int, typer.Option(min=1, help="Steps it then learns to make the model answer.")] = 1500,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a step, four times as many for patches.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-3,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder of checkpoints, loss curves and model (OUT/model).")] = Path(
        "runs/projector"
    ),
    as_json: Json = False,
) -> None:
    """Train what joins EfficientNet-lite0 to SmolLM2-135M-Instruct, both from their packages and left as they are."""
    writable(out)
    with stdout_reserved():
        from specmm.vlm.composed import build_processor, encoder, save_composed, untrained
        from specmm.vlm.data.scenes import R
        from specmm.vlm.tower import prepared
        from specmm.vlm.train.align import train_projector
        from specmm.vlm.train.projector import tower_features, train_between

        model, tokenizer = untrained(seed=seed), build_processor().tokenizer
        vision: Any = model.config.vision_config
        side, tokens = vision.image_size, model.config.image_seq_length
        options: dict[str, Any] = dict(
            features=lambda tower, pixels: tower_features(tower, prepared(pixels, side)), patch=R // round(tokens**0.5)
        )
        training, held_out = world(data, "train"), world(data, "test")
        align: dict[str, Any] = dict(steps=align_steps, batch=4 * batch, seed=seed)
        train_projector(model, tokenizer, training, out / "align", **align, **options)
        answers: dict[str, Any] = dict(steps=steps, batch=batch, lr=lr, seed=seed)
        train_between(model, encoder(model, tokenizer), training, held_out, out / "answers", **answers)
        save_composed(model, out / "model")
    done({"kind": "projector", "steps": steps, "outputs": [str(out / "model")]}, as_json)


def text(
    model: Annotated[str, typer.Argument(help="Folder of the target's model; the drafter is added to it.")],
    data: Data = EMOJI,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps in all.")] = 1500,
    batch: Annotated[int, typer.Option(min=1, help="Rows of questions a step.")] = 32,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    seed: Seed = 0,
    dim: Annotated[int, typer.Option(min=4, help="Width.")] = 96,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve.")] = Path("runs/text"),
    as_json: Json = False,
) -> None:
    """Train a language model that drafts without seeing the picture; the result is MODEL/drafters/text."""
    with stdout_reserved():
        import torch

        from specmm.hf.drafting import KINDS
        from specmm.hf.loading import find
        from specmm.vlm.data.packing import Encoder
        from specmm.vlm.loading import load_processor
        from specmm.vlm.train.text import build_text_model, train_text

        folder = beside(model, find(model))
        result = writable(folder / "drafters" / KINDS["text-draft"].place)
        tokenizer = load_processor(folder).tokenizer
        encoder = Encoder(tokenizer, 0)
        small = build_text_model(dim, layers, heads, len(tokenizer), encoder, seed)
        train_text(small, encoder, world(data, "train"), writable(out), steps=steps, batch=batch, lr=lr, seed=seed)
        small.to(torch.bfloat16).save_pretrained(result)  # type: ignore[arg-type]
    done({"kind": "text drafter", "model": model, "steps": steps, "outputs": [str(result)]}, as_json)
