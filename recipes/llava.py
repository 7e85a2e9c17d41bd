"""``llava``, ``projector`` and ``text``: a small LLaVA on easy-VQA and scenes of emoji, what joins
two models from packages, and a drafter of words, as pocket/llava and pocket/smollava were made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch

from recipes.data import world
from recipes.scenes.composed import encoder, prepared
from recipes.scenes.opinions import PROMPTS
from recipes.scenes.packing import Encoder
from recipes.scenes.scenes import R
from recipes.scenes.stream import learn_tokenizer
from recipes.scenes.tokenizer import build_processor
from recipes.training.align import train_projector
from recipes.training.llava import Sizes, build_model, save_model, train_target, train_tower
from recipes.training.projector import tower_features, train_between
from recipes.training.words import build_text_model, train_text
from specmm.hf.drafters.drafting import KINDS
from specmm.hf.loading.pretrained import find, load_processor
from specmm.loading.files import writable, write_whole
from specmm.recipes.recipe import Amount, Count, Found, Seed, Size, Width, beside
from specmm.vlm import loading

TOGETHER = (
    0.15  # of the learning rate once the tower learns, too: at 0.3 the loss doubled in fifty steps
)


def llava(
    *,
    data: Path,
    steps: Count,
    together_steps: Size,
    tower_steps: Size,
    align_steps: Size,
    batch: Count,
    lr: Amount,
    seed: Seed,
    dim: Width,
    layers: Count,
    heads: Count,
    tower_dim: Annotated[int, 32],
    tower_layers: Count,
    drafts_for: Path | None,
    expert_of: Path | None,
    out: Path,
) -> Found:
    """Train a small LLaVA that transformers loads as it is."""
    writable(out)
    place = _place(out, drafts_for, expert_of, seed)
    sizes = Sizes(dim, layers, heads, tower_dim, tower_layers)
    _check_same(out, {**vars(sizes), "seed": seed, "model": str(place)})
    _train(
        data, out, place, sizes, (tower_steps, align_steps, steps, together_steps), batch, lr, seed
    )
    if expert_of is not None:
        PROMPTS.save(place.parent)
    return {"kind": "llava", "steps": steps, "outputs": [str(place)]}


def _place(out: Path, drafts_for: Path | None, expert_of: Path | None, seed: int) -> Path:
    """Where the trained model goes."""
    if drafts_for is not None and expert_of is not None:
        raise ValueError(
            f"give drafts_for or expert_of, not both, got {drafts_for} and {expert_of}"
        )
    larger = drafts_for or expert_of
    if larger is None:
        return out / "model"
    if not (larger / "config.json").is_file():
        raise ValueError(f"{larger} must hold a model (config.json), train that one first")
    place = (
        larger
        / "drafters"
        / (KINDS["vlm-draft"].place if drafts_for else f"{KINDS['verdict'].place}/{seed}")
    )
    if (place / "config.json").exists():
        raise ValueError(f"{place} holds a model already, remove it or give another seed")
    return place


def _check_same(out: Path, run: dict[str, Any]) -> None:
    """Note in ``out`` what is trained there; a folder in which something else was begun cannot be
    gone on with.
    """
    note = out / "run.json"
    if not note.exists():
        write_whole(note, (json.dumps(run, indent=1) + "\n").encode())
    elif (found := json.loads(note.read_text())) != run:
        other = ", ".join(f"{k} {found.get(k)}" for k in run if found.get(k) != run[k])
        raise ValueError(
            f"{out} holds the training of another model ({other}), give this one its own --out"
        )


def _train(
    data: Path,
    out: Path,
    place: Path,
    sizes: Any,
    steps: tuple[int, int, int, int],
    batch: int,
    lr: float,
    seed: int,
) -> None:
    training = world(data, "train")
    held_out = world(data, "test")
    if not (out / "processor").exists():  # a resumed run goes on with the same tokens
        build_processor(learn_tokenizer(training), R, sizes.patch).save_pretrained(
            out / "processor"
        )
    processor = load_processor(out / "processor")
    encoder = Encoder(processor.tokenizer, sizes.image_tokens)
    model = build_model(sizes, len(processor.tokenizer), encoder, seed)
    train_tower(
        model,
        training,
        held_out,
        out / "tower",
        steps=steps[0],
        batch=4 * batch,
        lr=lr / 2,
        seed=seed,
    )
    train_projector(
        model,
        processor.tokenizer,
        training,
        out / "align",
        steps=steps[1],
        batch=4 * batch,
        seed=seed,
    )
    options: dict[str, Any] = dict(batch=batch, seed=seed)
    train_target(
        model, encoder, training, held_out, out / "target", steps=steps[2], lr=lr, **options
    )
    train_target(
        model,
        encoder,
        training,
        held_out,
        out / "together",
        steps=steps[3],
        lr=TOGETHER * lr,
        vision=True,
        **options,
    )
    save_model(model, processor, place)


def projector(
    *, data: Path, align_steps: Size, steps: Count, batch: Count, lr: Amount, seed: Seed, out: Path
) -> Found:
    """Train what joins EfficientNet-lite0 to SmolLM2-135M-Instruct, both from their packages and
    left as they are.
    """
    writable(out)
    model = loading.untrained(seed=seed)
    tokenizer = loading.build_processor().tokenizer
    vision: Any = model.config.vision_config
    side = vision.image_size
    tokens = model.config.image_seq_length
    options: dict[str, Any] = dict(
        features=lambda tower, pixels: tower_features(tower, prepared(pixels, side)),
        patch=R // round(tokens**0.5),
    )
    training = world(data, "train")
    held_out = world(data, "test")
    align: dict[str, Any] = dict(steps=align_steps, batch=4 * batch, seed=seed)
    train_projector(model, tokenizer, training, out / "align", **align, **options)
    answers: dict[str, Any] = dict(steps=steps, batch=batch, lr=lr, seed=seed)
    train_between(model, encoder(model, tokenizer), training, held_out, out / "answers", **answers)
    loading.save_composed(model, out / "model")
    return {"kind": "projector", "steps": steps, "outputs": [str(out / "model")]}


def text(
    *,
    model: str,
    data: Path,
    steps: Count,
    batch: Count,
    lr: Amount,
    seed: Seed,
    dim: Width,
    layers: Count,
    heads: Count,
    out: Path,
) -> Found:
    """Train a language model that drafts without seeing the picture; the result is
    MODEL/drafters/text.
    """
    folder = beside(model, find(model))
    result = writable(folder / "drafters" / KINDS["text-draft"].place)
    tokenizer = loading.load_processor(folder).tokenizer
    encoder = Encoder(tokenizer, 0)
    small = build_text_model(dim, layers, heads, len(tokenizer), encoder, seed)
    train_text(
        small,
        encoder,
        world(data, "train"),
        writable(out),
        steps=steps,
        batch=batch,
        lr=lr,
        seed=seed,
    )
    small.to(torch.bfloat16).save_pretrained(result)  # type: ignore[arg-type]
    return {"kind": "text drafter", "model": model, "steps": steps, "outputs": [str(result)]}
