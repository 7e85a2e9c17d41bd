"""``specmm train`` for next-scale models: tokenizer, VAR and CoDe's specialised pair, on the emoji of the others.

Every run keeps ``checkpoint.pt`` and ``loss.csv`` in its folder and resumes from there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.data import EMOJI, Batch, Data, Out, Seed, Steps, done, pictures
from specmm.cli.generate import Json
from specmm.cli.output import stdout_reserved, writable

SIDES = "1,2,3,4,6,8,12"

Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the step; pays in long runs.")]


def vqvae(
    data: Data = EMOJI,
    steps: Steps = 5000,
    batch: Batch = 32,
    seed: Seed = 0,
    codes: Annotated[int, typer.Option(min=2, help="Codebook size.")] = 1024,
    width: Annotated[int, typer.Option(min=1, help="Numbers a code.")] = 16,
    sides: Annotated[str, typer.Option(help="Tokens along the sides of the scales, coarse to fine.")] = SIDES,
    compiled: Compiled = True,
    out: Out = Path("runs/vqvae"),
    as_json: Json = False,
) -> None:
    """Train the multi-scale tokenizer; the result is OUT/model.safetensors."""
    writable(out)
    ladder = _sides(sides)
    with stdout_reserved():
        import torch

        from specmm.image_ar.scales.loading import save_vqvae
        from specmm.image_ar.scales.train.tokenizer import train_vqvae
        from specmm.image_ar.scales.vqvae import VQVAEConfig

        images = torch.from_numpy(pictures(data).images)
        levels = _levels(images.shape[1], ladder[-1])
        config = VQVAEConfig(codes, width, 32, (1, 2, 2, 2)[:levels], 1, ladder)
        model = train_vqvae(images, config, out, steps=steps, batch=batch, seed=seed, compiled=compiled)
        save_vqvae(model, out)
    done({"kind": "vqvae", "steps": steps, "outputs": [str(out)]}, as_json)


def var(
    tokenizer: Annotated[Path, typer.Option(help="Folder of the trained tokenizer.")] = Path("runs/vqvae"),
    data: Data = EMOJI,
    steps: Steps = 4000,
    batch: Batch = 32,
    seed: Seed = 0,
    depth: Annotated[int, typer.Option(min=1, help="Blocks.")] = 12,
    dim: Annotated[int, typer.Option(min=4, help="Width.")] = 192,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 6,
    shared_aln: Annotated[bool, typer.Option(help="One adaLN for all blocks: a third fewer weights.")] = False,
    compiled: Compiled = True,
    beside: Annotated[
        Path | None, typer.Option(help="A VAR's model folder: the result becomes its small model instead of a model.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve; the model is OUT/model.")] = Path(
        "runs/var"
    ),
    as_json: Json = False,
) -> None:
    """Train a VAR on the tokenizer's tokens; the result is a whole model in OUT/model, or BESIDE/small."""
    writable(out)
    with stdout_reserved():
        import torch

        from specmm.image_ar.scales.loading import load_vqvae
        from specmm.image_ar.scales.pair import save_small
        from specmm.image_ar.scales.pipeline import VARPipeline
        from specmm.image_ar.scales.settings import Settings
        from specmm.image_ar.scales.train.var import train_var
        from specmm.image_ar.scales.var import VARConfig

        vae, found = load_vqvae(tokenizer), pictures(data)
        shared: dict[str, Any] = {n: getattr(vae.config, n) for n in ("vocab_size", "z_channels", "patch_nums")}
        sizes: dict[str, Any] = dict(depth=depth, embed_dim=dim, num_heads=heads, shared_aln=shared_aln)
        config = VARConfig(num_classes=len(found.classes), **sizes, **shared)
        examples = _examples(vae, found, out)
        model = train_var(examples, config, out, steps=steps, batch=batch, seed=seed, compiled=compiled)
        if beside is None:
            place = out / "model"
            settings = Settings(classes=tuple(found.classes))
            VARPipeline(model, vae, None, settings).save_pretrained(place, torch.bfloat16)
        else:
            place = save_small(model, beside, vae, torch.bfloat16)
    done({"kind": "var", "steps": steps, "outputs": [str(place)]}, as_json)


def code(
    model: Annotated[str, typer.Argument(help="Folder of the large model.")],
    small: Annotated[str | None, typer.Option(help="The small model, if it is not in the large one's folder.")] = None,
    n: Annotated[int, typer.Option(help="Scales the large model will draw; two fewer than there are if -1.")] = -1,
    data: Data = EMOJI,
    steps: Steps = 1500,
    batch: Batch = 32,
    seed: Seed = 0,
    compiled: Compiled = True,
    out: Annotated[Path, typer.Option(help="Folder of checkpoints and loss curves; the pair is OUT/model.")] = Path(
        "runs/code"
    ),
    as_json: Json = False,
) -> None:
    """Specialise two models for CoDe at one N: the large on its coarse scales, the small distilled on its fine ones."""
    writable(out)
    with stdout_reserved():
        import torch

        from specmm.handoff import split
        from specmm.image_ar.scales.pipeline import VARPipeline
        from specmm.image_ar.scales.train.var import train_drafter, train_refiner

        pipe = VARPipeline.from_pretrained(model, "ar", torch.float32, small)
        if pipe.small is None:
            raise ValueError(f"{model} must hold a small model, got none, give one with --small")
        scales = len(pipe.transformer.config.ladder)
        at = len(split(scales, n if n != -1 else scales - 2)[0])
        if at in (0, scales):
            raise ValueError(f"n must leave scales to both models, from 1 to {scales - 1}, got {at}")
        examples = _examples(pipe.vae, pictures(data), out)
        options: dict[str, Any] = dict(steps=steps, batch=batch, seed=seed, compiled=compiled)
        drafter = train_drafter(pipe.transformer, examples, at, out / "drafter", **options)
        refiner = train_refiner(pipe.small, pipe.transformer, examples, at, out / "refiner", **options)
        pair = VARPipeline(drafter, pipe.vae, refiner, replace(pipe.settings, n=at))
        pair.save_pretrained(out / "model", torch.bfloat16)
    done({"kind": "code", "n": at, "steps": steps, "outputs": [str(out / "model")]}, as_json)


def _sides(text: str) -> tuple[int, ...]:
    """The sides in "1,2,3"; raises ``ValueError`` when they are no ladder."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"sides must be whole numbers with commas between, got {text!r}")
    from specmm.image_ar.scales.ladder import Ladder

    return Ladder(tuple(map(int, parts))).sides


def _levels(pixels: int, tokens: int) -> int:
    """Resolutions of a tokenizer that takes ``pixels`` to ``tokens`` along a side."""
    levels = (pixels // tokens).bit_length()
    if pixels != tokens * 2 ** (levels - 1) or not 1 <= levels <= 4:
        raise ValueError(f"the last side must be {pixels} pixels over 1, 2, 4 or 8, got {tokens}")
    return levels


def _examples(vae: Any, found: Any, out: Path) -> Any:
    """The pictures' tokens, kept in ``out`` for the next run, with their labels."""
    import torch

    from specmm.image_ar.scales.pair import tokenizer_fingerprint
    from specmm.image_ar.scales.train.tokenizer import encode_pictures
    from specmm.image_ar.scales.train.var import Examples

    sides = "-".join(map(str, vae.config.patch_nums))
    file = out / f"tokens-{tokenizer_fingerprint(vae)}-{sides}-{len(found.images)}.pt"
    if not file.exists():
        torch.save(encode_pictures(vae, torch.from_numpy(found.images)), file)
    tokens = torch.load(file, weights_only=True)
    return Examples(tokens, torch.from_numpy(found.labels), vae.quantize, len(found.classes))
