"""``specmm train msd``: a drafter that sees the picture, for a LLaVA that ``specmm train llava`` made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.generate import Json
from specmm.cli.output import emit, say, stdout_reserved, writable

EMOJI = Path("~/.cache/specmm/emoji")


def msd(
    model: Annotated[str, typer.Argument(help="Folder of the target's model; the drafter is added to it.")],
    data: Annotated[Path, typer.Option(help="Folder of the emoji; downloaded from npm when empty.")] = EMOJI,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps in all; pictures come in the second half.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Conversations a step.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate; 5e-5 for a billion parameters.")] = 1e-3,
    noise: Annotated[float, typer.Option(min=0, help="On the states the head reads.")] = 0.2,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the head.")] = 1,
    width: Annotated[int | None, typer.Option(min=1, help="Its inner width, the target's if not given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of initialisation and data.")] = 0,
    replace: Annotated[bool, typer.Option(help="Replace the model's MSD drafter.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve.")] = Path("runs/msd"),
    as_json: Json = False,
) -> None:
    """Train an MSD drafter in two stages, text first; the result is MODEL/drafters/msd."""
    with stdout_reserved():
        import torch

        from specmm.vlm.drafters.msd_files import save_msd
        from specmm.vlm.loading import PLACES, find, load_model, load_processor
        from specmm.vlm.target import VLMTarget
        from specmm.vlm.train.msd import msd_config, train_msd

        folder = find(model)
        result = folder / "drafters" / PLACES["msd"]
        if result.exists() and not replace:
            raise ValueError(f"{result} exists, give --replace to train another in its place")
        writable(result.parent)
        target = VLMTarget(load_model(folder, torch.float32), _processor(), model)
        source = _source(load_processor(folder), target, data.expanduser())
        sizes = {"num_hidden_layers": layers, **({"intermediate_size": width} if width else {})}
        config = msd_config(target, **sizes)
        options: dict[str, Any] = {"batch": batch, "lr": lr, "noise": noise, "seed": seed}
        head = train_msd(target, source, writable(out), steps=steps, config=config, **options)
        save_msd(head, result, dtype=torch.bfloat16, embeddings=False)
    found = {"kind": "msd", "steps": steps, "outputs": [str(result)]}
    if as_json:
        emit(found)
    else:
        say(f"trained an MSD drafter, {steps} steps: {result}")


def _processor() -> Any:
    from specmm.processors import Processor

    return Processor()


def _source(processor: Any, target: Any, data: Path) -> Any:
    """Draws the conversations of ``specmm train llava``: about scenes and easy-VQA, or facts without a picture."""
    from specmm.cli.train_vlm import open_world
    from specmm.vlm.data.packing import Encoder
    from specmm.vlm.train.msd import Example

    world = open_world(data, "train")
    encoder = Encoder(processor.tokenizer, target.model.config.image_seq_length)

    def draw(random: Any, visual: bool) -> Example:
        sample = next(world.conversations(encoder, random, float(visual)))
        vision = {} if sample.pixel_values is None else {"pixel_values": sample.pixel_values[None]}
        return Example(sample.input_ids, sample.answer_mask, vision)

    return draw
