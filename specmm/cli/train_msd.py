"""``specmm train msd``: a drafter that sees the picture, for a LLaVA that ``specmm train llava`` made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specmm.cli.data import EMOJI, Data, Seed, conversations, done, world
from specmm.cli.generate import Json
from specmm.cli.output import beside, stdout_reserved, writable

LONGEST = 80  # tokens of a description


def msd(
    model: Annotated[str, typer.Argument(help="Folder of the target's model; the drafter is added to it.")],
    data: Data = EMOJI,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps; pictures come in the second half.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Conversations a step.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate; 5e-5 for a billion parameters.")] = 1e-3,
    noise: Annotated[float, typer.Option(min=0, help="On the states the head reads.")] = 0.05,
    law_weight: Annotated[float, typer.Option(min=0, help="Of the laws' cross-entropy; 0.1 for wide targets.")] = 1.0,
    passes: Annotated[int, typer.Option(min=1, help="From the second on it reads its own states.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the head.")] = 1,
    ramp: Annotated[
        int | None, typer.Option(min=1, help="Steps in which pictures become most there is, instead of two stages.")
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Its inner width, the target's if not given.")] = None,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes its acceptance is measured on.")] = 32,
    seed: Seed = 0,
    replace: Annotated[bool, typer.Option(help="Replace the model's MSD drafter.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint and loss curve.")] = Path("runs/msd"),
    as_json: Json = False,
) -> None:
    """Train an MSD drafter in two stages, text first; the result is MODEL/drafters/msd."""
    with stdout_reserved():
        import torch

        from specmm.hf.drafting import KINDS
        from specmm.hf.loading import find
        from specmm.hf.target import VLMTarget
        from specmm.processors import Processor
        from specmm.vlm.drafters.msd_files import save_msd
        from specmm.vlm.loading import load_model, load_processor
        from specmm.vlm.train.msd import msd_config, train_msd

        folder = beside(model, find(model))
        result = folder / "drafters" / KINDS["msd"].place
        if result.exists() and not replace:
            raise ValueError(f"{result} exists, give --replace to train another in its place")
        writable(result.parent)
        target, processor = VLMTarget(load_model(folder, torch.float32), Processor(), model), load_processor(folder)
        sizes = {"num_hidden_layers": layers, **({"intermediate_size": width} if width else {})}
        options: dict[str, Any] = dict(batch=batch, lr=lr, noise=noise, law_weight=law_weight, passes=passes, seed=seed)
        options |= dict(config=msd_config(target, **sizes), ramp=ramp)
        head = train_msd(target, _source(processor, target, data), writable(out), steps=steps, **options)
        head.acceptance = _acceptance(target, head, processor, data, scenes)
        save_msd(head, result, dtype=torch.bfloat16, embeddings=False)
    done({"kind": "msd", "model": model, "steps": steps, "outputs": [str(result)]}, as_json)


def _source(processor: Any, target: Any, data: Path) -> Any:
    """Draws training examples of an MSD head, pictures in the size that the target sees."""
    from specmm.vlm.train.msd import Example

    sample_of = conversations(_encoder(processor, target), data)

    def draw(random: Any, visual: bool) -> Example:
        sample = sample_of(random, visual)
        vision = {} if sample.pixel_values is None else {"pixel_values": sample.pixel_values[None]}
        return Example(sample.input_ids, sample.answer_mask, vision)

    return draw


def _encoder(processor: Any, target: Any) -> Any:
    from torch.nn.functional import interpolate

    from specmm.hf.loading import find
    from specmm.vlm.composed import encoder, is_composed
    from specmm.vlm.data.packing import Encoder, to_pixels

    if is_composed(find(target.name)):
        return encoder(target.model, processor.tokenizer)
    sees = target.model.config.vision_config.image_size

    def pixels(image: Any) -> Any:
        return interpolate(to_pixels(image)[None], (sees, sees), mode="bicubic", antialias=True)[0]

    return Encoder(processor.tokenizer, target.model.config.image_seq_length, pixels=pixels)


def _acceptance(target: Any, head: Any, processor: Any, data: Path, scenes: int) -> Any:
    """By temperature, what is accepted of descriptions of held-out scenes: what method auto plans with."""
    from random import Random

    from PIL import Image

    from specmm.hf.prompt import VLMPrompt
    from specmm.hf.target import VLMTarget
    from specmm.processors import Processor
    from specmm.vlm.asking import Questions
    from specmm.vlm.tuning import measure_acceptance

    held_out, random, found = world(data, "test"), Random(0), {}
    drawn = [held_out.scene(random) for _ in range(scenes)]
    asked = Questions.of(
        [Image.fromarray(scene.image) for scene, _ in drawn], [turns[0].question for _, turns in drawn]
    )
    inputs, end = asked.inputs(processor), processor.tokenizer.eos_token_id
    for temperature in (0.0, 1.0):
        judge = VLMTarget(target.model, Processor(temperature), target.name)
        found[temperature] = measure_acceptance(judge, head, [VLMPrompt(inputs, LONGEST, asked)], [end])
    return found
