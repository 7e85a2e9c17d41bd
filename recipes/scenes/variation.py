"""Pictures drawn a little otherwise each time, so that a kind is known by its shape in styles never
seen.

Where its colour is asked for, a thing's colours change little.
"""

from __future__ import annotations

from random import Random

from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

TURN = 15.0  # degrees
SHEAR = 8.0  # degrees
SIZES = (0.8, 1.05)  # factors
HUE = 0.08  # of the circle; the others are factors
LIGHT = (0.75, 1.2)
CONTRAST = (0.7, 1.3)
SATURATION = (0.5, 1.4)
KEPT = 0.2  # of these ranges where the colour is asked for
GREY = 0.05  # probability, as the next two
BLURRED = 0.15
SHARPENED = 0.15
BLUR = 1.2  # pixels at most


def vary(picture: Image.Image, random: Random, coloured: bool) -> Image.Image:
    """``picture`` (RGBA) turned, sheared, scaled, recoloured, blurred or sharpened; ``coloured``
    keeps its hue.
    """
    shape = dict(angle=random.uniform(-TURN, TURN), scale=random.uniform(*SIZES), translate=[0, 0])
    shear = [random.uniform(-SHEAR, SHEAR), random.uniform(-SHEAR, SHEAR)]
    moved = F.affine(picture, shear=shear, interpolation=InterpolationMode.BILINEAR, **shape)
    colours = _recoloured(moved.convert("RGB"), random, coloured)
    colours.putalpha(moved.getchannel("A"))
    chance = random.random()
    if chance < BLURRED:
        return colours.filter(ImageFilter.GaussianBlur(random.uniform(0, BLUR)))
    return colours.filter(ImageFilter.SHARPEN) if chance < BLURRED + SHARPENED else colours


def _recoloured(picture: Image.Image, random: Random, coloured: bool) -> Image.Image:
    share = KEPT if coloured else 1.0
    picture = F.adjust_hue(picture, share * random.uniform(-HUE, HUE))
    picture = F.adjust_brightness(picture, _factor(LIGHT, share, random))
    picture = F.adjust_contrast(picture, _factor(CONTRAST, share, random))
    grey = not coloured and random.random() < GREY
    return F.adjust_saturation(picture, 0.0 if grey else _factor(SATURATION, share, random))


def _factor(bounds: tuple[float, float], share: float, random: Random) -> float:
    """A factor within ``share`` of the way from 1 to the ``bounds``."""
    return 1 + share * (random.uniform(*bounds) - 1)
