"""``specmm train`` for models of continuous tokens: autoencoder and MAR, on the emoji of the others.

Every run keeps ``checkpoint.pt`` and ``loss.csv`` in its folder and resumes from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.data import EMOJI, Batch, Data, Out, Seed, Steps, done, pictures
from specmm.cli.generate import Json
from specmm.cli.output import stdout_reserved, writable

HEAD_STEPS = "ddim100"  # "100" begins at t = 999, where a small model's error in eps is multiplied by 20,000


def kl(
    data: Data = EMOJI,
    steps: Steps = 4000,
    batch: Batch = 32,
    seed: Seed = 0,
    channels: Annotated[int, typer.Option(min=1, help="Numbers a latent cell.")] = 8,
    halvings: Annotated[int, typer.Option(min=1, max=4, help="Pixels a token's side are 2 to this power.")] = 3,
    kl_weight: Annotated[float, typer.Option(min=0, help="Of the divergence from the standard normal.")] = 1e-3,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the step.")] = True,
    out: Out = Path("runs/kl"),
    as_json: Json = False,
) -> None:
    """Train the KL autoencoder; the result is OUT/model.safetensors."""
    writable(out)
    with stdout_reserved():
        import torch

        from specmm.image_ar.continuous.kl import KLConfig
        from specmm.image_ar.continuous.loading import save_kl
        from specmm.image_ar.continuous.train.tokenizer import train_kl

        images = torch.from_numpy(pictures(data).images)
        side, widths = images.shape[1], (1, 2, 2, 2, 2)[: halvings + 1]
        if side % 2**halvings:
            raise ValueError(f"halvings must divide pictures of {side} pixels evenly, got {halvings}")
        config = KLConfig(32, widths, 1, channels, side, (side // 2**halvings,), 1.0)
        options: dict[str, Any] = dict(steps=steps, batch=batch, kl_weight=kl_weight, seed=seed, compiled=compiled)
        save_kl(train_kl(images, config, out, **options), out)
    done({"kind": "kl", "steps": steps, "outputs": [str(out)]}, as_json)


def mar(
    tokenizer: Annotated[Path, typer.Option(help="Folder of the trained autoencoder.")] = Path("runs/kl"),
    data: Data = EMOJI,
    steps: Steps = 6000,
    batch: Batch = 32,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 8e-4,
    seed: Seed = 0,
    dim: Annotated[int, typer.Option(min=4, help="Width of encoder and decoder.")] = 160,
    depth: Annotated[int, typer.Option(min=1, help="Blocks of each.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 5,
    buffer: Annotated[int, typer.Option(min=1, help="Slots in front that hold the class.")] = 4,
    head_width: Annotated[int, typer.Option(min=4, help="Width of the diffusion head.")] = 128,
    head_depth: Annotated[
        int, typer.Option(min=1, help="Blocks of the head: narrow and deep makes speculation pay.")
    ] = 6,
    start: Annotated[
        Path | None, typer.Option(help="Folder of a MAR of these sizes (`model/transformer`) to begin with.")
    ] = None,
    beside: Annotated[
        Path | None, typer.Option(help="A MAR's model folder: the result becomes its small model instead of a model.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve; the model is OUT/model.")] = Path(
        "runs/mar"
    ),
    as_json: Json = False,
) -> None:
    """Train a MAR on the autoencoder's latents; the result is a whole model in OUT/model, or BESIDE/small."""
    writable(out)
    with stdout_reserved():
        import torch

        from specmm.image_ar.continuous.loading import load_kl, load_mar
        from specmm.image_ar.continuous.train.target import train_mar
        from specmm.image_ar.continuous.train.tokenizer import encode_moments

        vae, emoji = load_kl(tokenizer), pictures(data)
        images, labels = torch.from_numpy(emoji.images), torch.from_numpy(emoji.labels)
        sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads}
        config = _config(vae, images.shape[1], len(emoji.classes), sizes, (buffer, head_depth, head_width))
        moments = encode_moments(vae, images)
        begun, rates = load_mar(start) if start else None, {"steps": steps, "batch": batch, "seed": seed}
        model = train_mar(moments, labels, vae.config.scale, config, out, start=begun, lr=lr, **rates)
        place = _save(model, vae, tuple(emoji.classes), out, beside)
    done({"kind": "mar", "steps": steps, "outputs": [str(place)]}, as_json)


def _config(vae: Any, side: int, classes: int, sizes: dict[str, int], rest: tuple[int, int, int]) -> Any:
    """The configuration of a MAR for ``vae``; ``rest``: buffer slots, depth and width of the head."""
    from specmm.image_ar.continuous.mar import MARConfig

    both: dict[str, Any] = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()}
    return MARConfig(
        img_size=side,
        vae_stride=vae.config.downsampling,
        vae_embed_dim=vae.config.z_channels,
        class_num=classes,
        buffer_size=rest[0],
        diffloss_d=rest[1],
        diffloss_w=rest[2],
        **both,
    )


def _save(model: Any, vae: Any, classes: tuple[str, ...], out: Path, beside: Path | None) -> Path:
    """Write a whole model, or the small model of the one in ``beside``; returns where."""
    import torch

    from specmm.image_ar.continuous.loading import kl_fingerprint, load_kl, load_mar
    from specmm.image_ar.continuous.pair import check_pair, check_same_vae, save_small
    from specmm.image_ar.continuous.pipeline import MARPipeline
    from specmm.image_ar.continuous.settings import Settings

    if beside is None:
        folder = writable(out / "model")
        settings = Settings(min(64, model.config.seq_len), HEAD_STEPS, classes=classes)
        MARPipeline(model.eval(), vae, None, settings).save_pretrained(folder, torch.bfloat16)
        return folder
    check_pair(load_mar(beside / "transformer"), model)
    check_same_vae(load_kl(beside / "vae"), kl_fingerprint(vae), beside)
    save_small(model.eval(), beside, vae, torch.bfloat16)
    return beside / "small"
