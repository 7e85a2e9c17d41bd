"""Block and EAGLE drafters of a LlamaGen (``drafter``), written to the model's ``drafters/``."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from tqdm import tqdm

from specmm import zoo
from specmm.derived import digest
from specmm.files import writable
from specmm.guidance import Guidance
from specmm.image_ar.pipeline import picture_type
from specmm.image_ar.shared import read_settings, write_settings
from specmm.image_ar.tokens.drafters.block import BlockConfig
from specmm.image_ar.tokens.loading import (
    load_block,
    load_gpt,
    load_vq,
    save_drafters,
    target_fingerprint,
)
from specmm.image_ar.tokens.pipeline import LlamaGenPipeline, LlamaGenSettings
from specmm.image_ar.tokens.target import LlamaGenTarget, Prompt
from specmm.processors import Processor
from specmm.recipes.recipe import Amount, Count, Found, Open, Recipe, Seed, Size, beside
from specmm.recipes.settings import facts_of
from specmm.recipes.source import key_of
from specmm.recipes.training.block_drafter import measure_acceptance, measure_taus, train_block
from specmm.recipes.training.eagle_drafter import train_eagle
from specmm.recipes.training.encoding import CLASS_DROPOUT, encode_views
from specmm.registry import unknown
from specmm.training import Run, check_same, one_first

KINDS = ("block", "eagle")
LR = {"block": 1e-3, "eagle": 1e-4}
AT_ONCE = 96  # pictures that the target draws


def drafter(
    *,
    model: str,
    kind: str,
    data: Open,
    steps: Count,
    batch: Count,
    seed: Seed,
    levels: Count,
    layers: Count,
    aux_layers: str,
    inner: Size,
    overlap_weight: Amount,
    temperature: Annotated[float, 0.01],
    noise: Amount,
    lr: float | None,
    drawn: Size,
    only_drawn: bool,
    cfg: float | None,
    start: Path | None,
    replace: bool,
    out: Path | None,
    recipe: Recipe,
) -> Found:
    """Train a drafter for a model; the result is MODEL/drafters/KIND."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    place, result = drafter_folders(model, kind, replace)
    folder = writable(out or Path("runs") / kind)
    facts = facts_of(recipe)
    check_same(folder, facts)
    options: dict[str, Any] = dict(batch=batch, seed=seed)
    if kind != "block" and (start is not None or only_drawn):
        raise ValueError(f"start and only_drawn go with kind=block, got {kind}; leave them out")
    if only_drawn and not drawn:
        raise ValueError("only_drawn needs pictures that the target draws: give --set drawn=N")
    block = dict(
        overlap_weight=overlap_weight, temperature=temperature, dropout=_dropout(place, cfg)
    )
    options |= {"noise": noise} if kind == "eagle" else block
    with one_first():
        target, *examples = _examples(place, data, folder, (drawn, only_drawn), cfg, seed)
    read = _layers(aux_layers, target.config.n_layer)
    sizes = dict(levels=levels, layers=layers, aux_layers=read, inner=inner)
    if start is not None:
        options["start"] = begun = load_block(start, target)
        sizes = vars(begun.config) | ({"inner": inner} if inner else {})
        sizes["levels"] = max(levels, begun.config.levels)
    facts |= {"pictures learnt": key_of(x.numpy().tobytes() for x in examples)}
    facts |= {"target": digest(target)}
    run = Run(folder, steps, lr or LR[kind], batch=batch, made_of=facts)
    head = _train_drafter(kind, (target, *examples), sizes, run, options)
    with one_first() as first:
        if first:
            save_drafters({kind: head}, result.parent, target, torch.bfloat16)
            if kind == "block":
                _note_acceptance(place, target, head)
    return {"kind": kind, "model": model, "steps": steps, "outputs": [str(result)]}


def drafter_folders(model: str, kind: str, replace: bool) -> tuple[Path, Path]:
    """The folder of a ``model`` that draws, and that of its drafter called ``kind``, which can be
    written; raises ``ValueError`` if that exists and is not to be replaced.
    """
    there = zoo.pocket_models().get(model, Path(model))
    if picture_type(there) is not None:
        raise ValueError(
            f"drafters are trained for LlamaGens, got {model}, a picture model of transformers: "
            "sjd and gsd need none"
        )
    place = zoo.find(model, zoo.PIPELINE)
    result = beside(model, place) / "drafters" / kind
    if result.exists() and not replace:
        raise ValueError(f"{result} exists, give --set replace=true to train another in its place")
    writable(result.parent)
    return place, result


def _dropout(model: Path, cfg: float | None) -> float:
    """The share of pictures a block drafter sees without their class: none where the model is not
    guided.
    """
    guided = (read_settings(LlamaGenSettings, model).cfg if cfg is None else cfg) > 1
    # more than the model's, for both guidance branches draft
    return 3 * CLASS_DROPOUT if guided else 0.0


def _layers(text: str, count: int) -> tuple[int, ...]:
    """The layers in "4,9,14"; raises ``ValueError`` for one that the target does not have."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) < count for part in found):
        raise ValueError(
            f"aux_layers must be layers from 0 to {count - 1} with commas between, got {text!r}"
        )
    return tuple(map(int, found))


def _train_drafter(
    kind: str, examples: tuple[Any, ...], sizes: dict[str, Any], run: Run, options: dict[str, Any]
) -> Any:
    """A head trained on ``examples`` (target, tokens, labels); ``sizes`` are those of a block."""
    target, tokens, labels = examples
    if kind == "eagle":
        return train_eagle(target, tokens, labels, run, ffn_dim=sizes["inner"] or None, **options)
    return train_block(
        target, tokens, labels, BlockConfig(**sizes | {"target": target.config}), run, **options
    )


def _examples(
    model: Path, data: Open, out: Path, drawn: tuple[int, bool], cfg: float | None, seed: int
) -> tuple[Any, Any, Any]:
    """The target, tokens [M, 2, T] and labels [M]: the data's, then so many ``drawn`` of the
    target, or these alone.
    """
    target, vq = load_gpt(model / "transformer"), load_vq(model / "vq")
    side = round(target.config.block_size**0.5) * vq.config.downsampling
    pictures = data(read_settings(LlamaGenSettings, model).classes, target.config.num_classes, side)
    (count, alone), labels = drawn, torch.from_numpy(pictures.labels)
    if pictures.images is None and not count:
        raise ValueError(
            "a drafter needs pictures to learn from: give --set data=FOLDER or --set drawn=N"
        )
    parts = (
        []
        if alone or pictures.images is None
        else [(picture_tokens(vq, pictures.images, out), labels)]
    )
    if count:
        rows = torch.randint(len(labels), (count,), generator=torch.Generator().manual_seed(seed))
        own = _draw(model, target, vq, labels[rows], out / "drawn", cfg, seed)
        parts.append((own[:, None].repeat(1, 2, 1), labels[rows]))
    tokens, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return target, tokens, labels


def _draw(
    model: Path, target: Any, vq: Any, labels: Any, out: Path, cfg: float | None, seed: int
) -> Any:
    """Tokens [N, T] that the target draws for ``labels`` [N] by plain decoding, kept in ``out``
    batch by batch, so that an interrupted run continues.
    """
    pipe = LlamaGenPipeline(target, vq, {}, read_settings(LlamaGenSettings, model))
    pipe.set_progress_bar_config(disable=True)
    kept = writable(out / f"{target_fingerprint(target)}-{cfg}-{seed}")
    found = []
    for i, part in enumerate(tqdm(labels.split(AT_ONCE), desc="draw")):
        file = kept / f"{i:04d}-{len(part)}.pt"
        if not file.exists():
            generator = torch.Generator().manual_seed(1_000_003 * seed + i)
            given: dict[str, Any] = dict(batch_size=len(part), output_type="latent", cfg=cfg)
            torch.save(pipe(part.tolist(), generator=generator, **given).tokens, file)
        found.append(torch.load(file, weights_only=True))
    return torch.cat(found)


def _note_acceptance(model: Path, target: Any, head: Any, pictures: int = 32) -> None:
    """Measure what is accepted by level and rank at the model's sampling, and the tau of methods
    without a drafter, and write it where method auto reads it.
    """
    settings = read_settings(LlamaGenSettings, model)
    processor = Processor(settings.temperature, settings.top_k, settings.top_p)
    judge = LlamaGenTarget(target, Guidance(settings.cfg, settings.cfg_interval), processor)
    prompt = Prompt(torch.arange(pictures) % target.config.num_classes)
    table = measure_acceptance(head, judge, prompt, range(pictures))
    taus = settings.taus | measure_taus(judge, prompt, range(pictures))
    made = dataclasses.replace(settings, acceptance=table, taus=taus)
    write_settings(made, model)


def picture_tokens(vq: Any, images: Any, out: Path) -> Any:
    """Tokens [M, 2, T] of the pictures and their mirror images; ``out`` keeps them."""

    def encode() -> Any:
        return encode_views(lambda x: vq.encode(x).indices.flatten(1), torch.from_numpy(images))

    return kept_tokens(vq, images, out / "tokens.pt", encode)


def kept_tokens(vq: Any, images: Any, file: Path, encode: Callable[[], Any]) -> Any:
    """What ``encode`` makes of ``images`` (an array) by the tokenizer ``vq``; ``file`` keeps it as
    long as both are the same.
    """
    weights = b"".join(v.detach().float().numpy().tobytes() for v in vq.state_dict().values())
    key = hashlib.sha256(weights + images.tobytes()).hexdigest()
    if file.exists():
        kept = torch.load(file, weights_only=True)
        if kept["key"] == key:
            return kept["tokens"]
    vq.eval()
    tokens = encode()
    torch.save({"key": key, "tokens": tokens}, file)
    return tokens
