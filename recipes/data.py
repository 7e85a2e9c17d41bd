"""Where the pocket models' data come from, and what is said when they cannot be made."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image
from torch.nn.functional import interpolate

from recipes.emoji import load
from recipes.scenes.composed import encoder
from recipes.scenes.packing import Encoder, to_pixels
from recipes.scenes.stream import load_world
from specmm.hf.loading import find
from specmm.recipes.conversations import Conversations
from specmm.recipes.pictures import Pictures
from specmm.recipes.training.msd import Example
from specmm.vlm.asking import Questions
from specmm.vlm.loading import is_composed

EMOJI = Path("~/.cache/specmm/emoji")  # downloaded from npm and rasterised when it is empty


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Raise ``ValueError`` saying what is missing when the emoji in ``folder`` cannot be made."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"rasterising emoji needs {error.name}, run: pip install 'specmm[train]'"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ValueError(
            f"npm could not fetch the emoji ({error.stderr or error}), fill {folder} by hand"
        ) from error


def emoji(folder: Path) -> Any:
    """The training split of the emoji with their classes."""
    with making(folder):
        return load(folder)


def emoji_pictures(place: str, names: Sequence[str], count: int, side: int) -> Pictures:
    """The emoji in ``place``, for a drafter of a model that was trained on them."""
    found = emoji(Path(place).expanduser())
    return Pictures(found.images, found.labels)


def world(folder: Path, split: str) -> Any:
    """Scenes and easy-VQA of a split."""
    with making(folder):
        return load_world(folder, split)


def scene_conversations(place: str, target: Any, processor: Any) -> Conversations:
    """What ``llava`` trains on, about pictures (in the size that the target sees) or facts without
    one; descriptions of held-out scenes are asked for.
    """
    folder = Path(place).expanduser()
    encoder, drawn = _encoder(processor, target), world(folder, "train")

    def draw(random: Random, visual: bool) -> Example:
        sample = next(drawn.conversations(encoder, random, float(visual)))
        vision = {} if sample.pixel_values is None else {"pixel_values": sample.pixel_values[None]}
        return Example(sample.input_ids, sample.answer_mask, vision)

    return Conversations(draw, lambda count: _described(world(folder, "test"), count))


def _encoder(processor: Any, target: Any) -> Any:
    if is_composed(find(target.name)):
        return encoder(target.model, processor.tokenizer)
    sees = target.model.config.vision_config.image_size

    def pixels(image: Any) -> Any:
        return interpolate(to_pixels(image)[None], (sees, sees), mode="bicubic", antialias=True)[0]

    return Encoder(processor.tokenizer, target.model.config.image_seq_length, pixels=pixels)


def _described(held_out: Any, count: int) -> Any:
    """Questions for descriptions of ``count`` scenes."""
    random = Random(0)
    drawn = [held_out.scene(random) for _ in range(count)]
    return Questions.of(
        [Image.fromarray(scene.image) for scene, _ in drawn],
        [turns[0].question for _, turns in drawn],
    )
