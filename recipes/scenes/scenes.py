"""Scenes: a few emoji of named kinds on a coloured background, at nine places and two sizes.

A scene is drawn from a ``random.Random`` alone, so that the same seed gives the same scene on every
machine.

Shapes: R = 96 pixels a side; ``image`` [R, R, 3] uint8; ``owner`` [R, R] int8, the number of the
thing that covers a pixel, −1 for the background.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
import numpy.typing as npt
from PIL import Image

from recipes.scenes.sprites import Array, Sprite, Sprites
from recipes.scenes.variation import vary

R = 96
BACKGROUNDS = {
    "white": (245, 245, 245),
    "gray": (150, 150, 150),
    "pink": (250, 170, 195),
    "yellow": (250, 230, 110),
    "orange": (245, 160, 70),
    "purple": (165, 120, 205),
    "blue": (110, 160, 235),
    "green": (130, 205, 130),
}
PLACES = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
SIZES = {"small": 24, "big": 36}  # pixels
STARTS = {
    "small": ((0, 12), (36,), (60, 72)),
    "big": ((0,), (24, 36), (60,)),
}  # of the three columns and rows
SHIFT = 2  # pixels a thing may be away from its start
MOST = 4  # things in a scene
REPEAT = 0.35  # probability that a thing is of the same kind as the one before
JITTER = 12  # of a background's red, green and blue
VARIATIONS = 64  # of a thing's picture at each size, where pictures vary
OVERLAP = 4  # pixels two things may share along an axis


@dataclass(frozen=True)
class Thing:
    """One thing in a scene; ``place`` indexes ``PLACES``."""

    kind: str
    colour: str
    size: str
    place: int


@dataclass(frozen=True)
class Scene:
    """A picture and what is in it, in reading order; see the module docstring for shapes."""

    image: Array
    owner: npt.NDArray[np.int8]
    background: str
    things: tuple[Thing, ...]


def compose(sprites: Sprites, random: Random) -> Scene:
    """Draw a scene of one to four things."""
    chosen = _choose(sprites, random)
    laid_out = sorted(lay_out(len(chosen), random))
    background = random.choice(list(BACKGROUNDS))
    shade = [min(max(c + random.randint(-JITTER, JITTER), 0), 255) for c in BACKGROUNDS[background]]
    image = np.tile(np.array(shade, dtype=np.float32), (R, R, 1))
    owner = blank()[1]
    things = []
    for i, (sprite, (place, size, box)) in enumerate(zip(chosen, laid_out, strict=True)):
        pixels = _scaled(sprite, box[2], random.randrange(VARIATIONS) if sprites.varied else None)
        _paste(image, owner, i, pixels, box, mirrored=random.random() < 0.5)
        things.append(Thing(sprite.kind, sprite.colour, size, place))
    return Scene(image.round().astype(np.uint8), owner, background, tuple(things))


def blank() -> tuple[Array, npt.NDArray[np.int8]]:
    """Image and owner of a scene in which nothing is drawn yet."""
    return np.zeros((R, R, 3), dtype=np.uint8), np.full((R, R), -1, dtype=np.int8)


Box = tuple[int, int, int]  # top, left, side


def _choose(sprites: Sprites, random: Random) -> list[Sprite]:
    kinds: list[str] = []
    for _ in range(random.randint(1, MOST)):
        again = kinds and random.random() < REPEAT
        kinds.append(kinds[-1] if again else random.choice(sprites.kinds))
    chosen = [random.choice(sprites.of_kind[kind]) for kind in kinds]
    random.shuffle(chosen)
    return chosen


def lay_out(count: int, random: Random) -> list[tuple[int, str, Box]]:
    """``count`` of (place, size, box), none hiding another."""
    found: list[tuple[int, str, Box]] = []
    while len(found) < count:
        place = random.randrange(9)
        size = random.choice(list(SIZES))
        side = SIZES[size]
        starts = [
            random.choice(STARTS[size][at]) + random.randint(-SHIFT, SHIFT)
            for at in divmod(place, 3)
        ]
        top, left = (min(max(start, 0), R - side) for start in starts)
        box = (top, left, side)
        if all(place != other and not _overlap(box, b) for other, _, b in found):
            found.append((place, size, box))
        elif random.random() < 0.02:
            found.clear()  # no place is left for a big one: begin again
    return found


def _overlap(a: Box, b: Box) -> bool:
    return all(min(a[i] + a[2], b[i] + b[2]) - max(a[i], b[i]) > OVERLAP for i in (0, 1))


def _paste(
    image: npt.NDArray[np.float32],
    owner: npt.NDArray[np.int8],
    i: int,
    pixels: Array,
    box: Box,
    mirrored: bool,
) -> None:
    top, left, side = box
    if mirrored:
        pixels = pixels[:, ::-1]
    window = np.s_[top : top + side, left : left + side]
    alpha = pixels[..., 3:] / np.float32(255)
    image[window] = image[window] * (1 - alpha) + pixels[..., :3] * alpha
    owner[window][pixels[..., 3] > 127] = i


@lru_cache(maxsize=1 << 16)
def _scaled(sprite: Sprite, side: int, variation: int | None) -> Array:
    picture = Image.fromarray(sprite.pixels)
    if variation is not None:
        picture = vary(picture, Random(f"{variation} {side}"), bool(sprite.colour))
    return np.asarray(picture.resize((side, side), Image.Resampling.LANCZOS))
