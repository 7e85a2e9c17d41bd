"""``specmm train``: tokenizer, target and drafters of a LlamaGen on emoji, as ``pocket/llamagen`` was made.

Every run keeps ``checkpoint.pt`` and ``loss.csv`` in its folder and resumes from there.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.data import EMOJI, Batch, Data, Out, Seed, Steps, done
from specmm.cli.data import pictures as pictures_of
from specmm.cli.generate import Json
from specmm.cli.output import beside, stdout_reserved, writable

app = typer.Typer(no_args_is_help=True, help="Train a tokenizer, a target, a drafter.", rich_markup_mode=None)
KINDS = ("block", "eagle")
DRAWN_AT_ONCE = 96  # pictures


@app.command()
def tokenizer(
    data: Data = EMOJI,
    steps: Steps = 3600,
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

        images = torch.from_numpy(pictures_of(data).images)
        config = VQConfig(codes, 8, 32, (1, 2, 2), 1, 64)
        model = train_tokenizer(images, config, out, steps=steps, batch=batch, seed=seed)
        rows = model.quantize.embedding.weight.data
        rows.copy_(F.normalize(rows, dim=-1))  # the same codes; LANTERN's distances are those of the rows as stored
        save_vq(model, out)
    done({"kind": "tokenizer", "steps": steps, "outputs": [str(out)]}, as_json)


@app.command()
def target(
    tokenizer: Annotated[Path, typer.Option(help="Folder of the trained tokenizer.")] = Path("runs/vq"),
    data: Data = EMOJI,
    steps: Steps = 2900,
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

        from specmm.image_ar.tokens.gpt import GPTConfig
        from specmm.image_ar.tokens.loading import load_vq
        from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
        from specmm.image_ar.tokens.settings import Settings
        from specmm.image_ar.tokens.train.target import train_target

        vq, pictures = load_vq(tokenizer), pictures_of(data)
        tokens = _tokens(vq, pictures.images, out)
        sizes: dict[str, Any] = dict(dim=dim, n_layer=layers, n_head=heads, num_classes=len(pictures.classes))
        config = GPTConfig(vocab_size=vq.config.codebook_size, block_size=tokens.shape[-1], **sizes)
        labels = torch.from_numpy(pictures.labels)
        model = train_target(tokens, labels, config, out, steps=steps, batch=batch, seed=seed)
        pipe = LlamaGenPipeline(model.eval(), vq, {}, Settings(classes=tuple(pictures.classes)))
        pipe.save_pretrained(out / "model", torch.bfloat16)
    done({"kind": "target", "steps": steps, "outputs": [str(out / "model")]}, as_json)


@app.command()
def drafter(
    model: Annotated[str, typer.Argument(help="Folder of the target's model; the drafter is added to it.")],
    kind: Annotated[str, typer.Option(help="block (one pass drafts all levels) or eagle.")] = "block",
    data: Data = EMOJI,
    steps: Steps = 3600,
    batch: Batch = 16,
    seed: Seed = 0,
    levels: Annotated[int, typer.Option(min=1, help="Tokens a block drafter drafts.")] = 6,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a block drafter.")] = 2,
    taps: Annotated[str, typer.Option(help="Target layers a block drafter reads besides the last, as in 4,9,14.")] = "",
    inner: Annotated[int, typer.Option(min=0, help="Width of its feed-forward layers, 0 for the target's.")] = 0,
    overlap_weight: Annotated[float, typer.Option(min=0, help="Of acceptance in a block drafter's loss.")] = 1.0,
    temperature: Annotated[float, typer.Option(min=0.01, help="That a block drafter's model samples at.")] = 1.0,
    noise: Annotated[float, typer.Option(min=0, help="On the states an EAGLE head reads.")] = 0.2,
    lr: Annotated[float | None, typer.Option(help="Learning rate, 1e-3 (block) or 1e-4 (eagle) if not given.")] = None,
    drawn: Annotated[int, typer.Option(min=0, help="Pictures the target draws to train on, besides the data.")] = 0,
    only_drawn: Annotated[bool, typer.Option("--only-drawn", help="Train a block drafter on these alone.")] = False,
    cfg: Annotated[float | None, typer.Option(help="Guidance scale it is to serve, and of these pictures.")] = None,
    start: Annotated[Path | None, typer.Option(help="Folder of a block drafter of this model to go on from.")] = None,
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
    result = beside(model, zoo.find(model)) / "drafters" / kind
    if result.exists() and not replace:
        raise ValueError(f"{result} exists, give --replace to train another in its place")
    writable(result.parent)
    folder = writable(out or Path("runs") / kind)
    with stdout_reserved():
        from specmm.image_ar.tokens.drafters.files import save_drafters

        options: dict[str, Any] = dict(steps=steps, batch=batch, seed=seed, **({"lr": lr} if lr else {}))
        if kind != "block" and (start is not None or only_drawn):
            raise ValueError(f"--start and --only-drawn go with --kind block, got {kind}; leave them out")
        if only_drawn and not drawn:
            raise ValueError("--only-drawn needs pictures that the target draws: give --drawn N")
        block = dict(overlap_weight=overlap_weight, temperature=temperature, dropout=_dropout(zoo.find(model), cfg))
        options |= {"noise": noise} if kind == "eagle" else block
        target, *examples = _examples(zoo.find(model), pictures_of(data), folder, (drawn, only_drawn), cfg, seed)
        read = _layers(taps, target.config.n_layer)
        sizes = dict(levels=levels, layers=layers, taps=read, inner=inner)
        if start is not None:
            from specmm.image_ar.tokens.drafters.files import load_block

            options["start"] = begun = load_block(start, target)
            sizes = vars(begun.config) | ({"inner": inner} if inner else {})
        head = _train_drafter(kind, (target, *examples), sizes, folder, options)
        save_drafters({kind: head}, result.parent, target, _bfloat16())
        if kind == "block":
            _note_acceptance(zoo.find(model), target, head)
    done({"kind": kind, "model": model, "steps": steps, "outputs": [str(result)]}, as_json)


def _dropout(model: Path, cfg: float | None) -> float:
    """The share of pictures a block drafter sees without their class: none where the model is not guided."""
    from specmm.image_ar.settings import read_settings
    from specmm.image_ar.tokens.settings import Settings
    from specmm.image_ar.training import CLASS_DROPOUT

    guided = (read_settings(Settings, model).cfg if cfg is None else cfg) > 1
    return 3 * CLASS_DROPOUT if guided else 0.0  # more than the model's, for both guidance branches draft


def _layers(text: str, count: int) -> tuple[int, ...]:
    """The layers in "4,9,14"; raises ``ValueError`` when one is not among the target's ``count``."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) < count for part in found):
        raise ValueError(f"taps must be layers from 0 to {count - 1} with commas between, got {text!r}")
    return tuple(map(int, found))


def _train_drafter(
    kind: str, examples: tuple[Any, ...], sizes: dict[str, Any], out: Path, options: dict[str, Any]
) -> Any:
    """A head trained on ``examples`` (target, tokens, labels); ``sizes`` are those of a block."""
    target, tokens, labels = examples
    if kind == "eagle":
        from specmm.image_ar.tokens.train.eagle import train_eagle

        return train_eagle(target, tokens, labels, out, **options)
    from specmm.image_ar.tokens.drafters.block import BlockConfig
    from specmm.image_ar.tokens.train.block import train_block

    return train_block(target, tokens, labels, BlockConfig(**sizes | {"target": target.config}), out, **options)


def _examples(
    model: Path, pictures: Any, out: Path, drawn: tuple[int, bool], cfg: float | None, seed: int
) -> tuple[Any, Any, Any]:
    """The target, tokens [M, 2, T] and labels [M]: the data's, then so many ``drawn`` of the target, or these alone."""
    import torch

    from specmm.image_ar.tokens.loading import load_gpt, load_vq

    target, vq = load_gpt(model / "transformer"), load_vq(model / "vq")
    (count, alone), labels = drawn, torch.from_numpy(pictures.labels)
    parts = [] if alone else [(_tokens(vq, pictures.images, out), labels)]
    if count:
        rows = torch.randint(len(labels), (count,), generator=torch.Generator().manual_seed(seed))
        own = _draw(model, target, vq, labels[rows], out / "drawn", cfg, seed)
        parts.append((own[:, None].repeat(1, 2, 1), labels[rows]))
    tokens, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return target, tokens, labels


def _draw(model: Path, target: Any, vq: Any, labels: Any, out: Path, cfg: float | None, seed: int) -> Any:
    """Tokens [N, T] that the target draws for ``labels`` [N] by plain decoding, kept in ``out`` batch by batch."""
    import torch
    from tqdm import tqdm

    from specmm.image_ar.settings import read_settings
    from specmm.image_ar.tokens.drafters.fingerprint import target_fingerprint
    from specmm.image_ar.tokens.pipeline import LlamaGenPipeline
    from specmm.image_ar.tokens.settings import Settings

    pipe = LlamaGenPipeline(target, vq, {}, read_settings(Settings, model))
    pipe.set_progress_bar_config(disable=True)
    kept = writable(out / f"{target_fingerprint(target)}-{cfg}-{seed}")
    found = []
    for i, part in enumerate(tqdm(labels.split(DRAWN_AT_ONCE), desc="draw")):
        file = kept / f"{i:04d}-{len(part)}.pt"
        if not file.exists():
            generator = torch.Generator().manual_seed(1_000_003 * seed + i)
            made = pipe(part.tolist(), cfg=cfg, batch_size=len(part), generator=generator, output_type="latent")
            torch.save(made.tokens, file)
        found.append(torch.load(file, weights_only=True))
    return torch.cat(found)


def _note_acceptance(model: Path, target: Any, head: Any, pictures: int = 32) -> None:
    """Measure what is accepted by level and rank at the model's sampling, and write it where method auto reads it."""
    import dataclasses

    import torch

    from specmm.image_ar.settings import read_settings, write_settings
    from specmm.image_ar.tokens.acceptance import measure_acceptance
    from specmm.image_ar.tokens.settings import Settings
    from specmm.image_ar.tokens.target import Guidance, LlamaGenTarget, Prompt
    from specmm.processors import Processor

    settings = read_settings(Settings, model)
    processor = Processor(settings.temperature, settings.top_k, settings.top_p)
    judge = LlamaGenTarget(target, Guidance(settings.cfg, settings.cfg_interval), processor)
    prompt = Prompt(torch.arange(pictures) % target.config.num_classes)
    table = measure_acceptance(head, judge, prompt, range(pictures))
    write_settings(dataclasses.replace(settings, acceptance=table), model)


def _bfloat16() -> Any:
    import torch

    return torch.bfloat16


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
