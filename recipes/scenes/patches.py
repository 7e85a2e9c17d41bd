"""What each patch of a picture shows: labels a vision tower learns from before it meets a language
model.

Shape letters: B pictures, N patches, R pixels a side.
"""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.scenes.easy import Example
from recipes.scenes.kinds import COLOURS, KINDS, SHAPES
from recipes.scenes.packing import to_pixels
from recipes.scenes.scenes import PLACES, SIZES, Scene
from recipes.scenes.sprites import Array
from recipes.scenes.stream import EASY, World

IGNORED = -100
NAMES = ("nothing", *(kind.name for kind in KINDS), *SHAPES)
HEADS = {"kind": len(NAMES), "colour": len(COLOURS), "size": len(SIZES), "place": len(PLACES)}
COVERED = 0.2  # of a patch, from which on it shows the thing
CONTRAST = (
    40  # by which a pixel of a shape differs from the background, red, green and blue together
)

Labels = npt.NDArray[np.int64]  # [N, 4], a column for each of HEADS


def labelled(world: World, random: Random, count: int, patch: int) -> tuple[Tensor, Tensor]:
    """Pictures [B, 3, R, R] and the labels [B, N, 4] of their patches."""
    pixels = []
    labels = []
    for _ in range(count):
        image, found = _one(world, random, patch)
        pixels.append(to_pixels(image))
        labels.append(torch.from_numpy(found))
    return torch.stack(pixels), torch.stack(labels)


def _one(world: World, random: Random, patch: int) -> tuple[Array, Labels]:
    if world.easy and random.random() < EASY:
        example = random.choice(world.easy)
        return example.image, example_labels(example, patch)
    scene = world.scene(random)[0]
    return scene.image, scene_labels(scene, patch)


def scene_labels(scene: Scene, patch: int) -> Labels:
    """Labels [N, 4] of a scene's patches; what has no colour of its own is ``IGNORED`` in that
    column.
    """
    rows = [[0, COLOURS.index(scene.background), IGNORED, IGNORED]]
    for thing in scene.things:
        colour = COLOURS.index(thing.colour) if thing.colour else IGNORED
        rows.append([NAMES.index(thing.kind), colour, list(SIZES).index(thing.size), thing.place])
    shares = np.stack(
        [_shares(scene.owner == i, patch) for i in range(len(scene.things))]
    )  # [things, N]
    shown = np.where(shares.max(0) > COVERED, shares.argmax(0) + 1, 0)
    return np.array(rows, dtype=np.int64)[shown]


def example_labels(example: Example, patch: int) -> Labels:
    """Labels [N, 4] of an easy-VQA picture, from the answers to its own questions."""
    answers = {turn.answer for turn in example.turns}
    shape = [NAMES.index(a) for a in SHAPES if a in answers]
    colour = [COLOURS.index(a) for a in COLOURS if a in answers]
    thing = [shape[0] if shape else IGNORED, colour[0] if colour else IGNORED, IGNORED, IGNORED]
    distance = np.abs(example.image.astype(np.int64) - example.image[0, 0]).sum(-1)
    shown = _shares(distance > CONTRAST, patch) > COVERED
    return np.array([[0, IGNORED, IGNORED, IGNORED], thing], dtype=np.int64)[shown.astype(int)]


def _shares(mask: npt.NDArray[np.bool_], patch: int) -> npt.NDArray[np.float64]:
    side = len(mask) // patch
    return mask.reshape(side, patch, side, patch).mean((1, 3)).reshape(-1)
