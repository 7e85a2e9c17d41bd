"""Pictures drawn a little otherwise each time, so that a kind is known by its shape in styles never seen.

Where a thing has no colour of its own its hue moves freely; where its colour is asked for, hardly.
"""

from __future__ import annotations

from random import Random

from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

TURN, SHEAR, SIZES = 15.0, 8.0, (0.8, 1.05)  # degrees, degrees, factors
HUE, HUE_OF_COLOURED = 0.08, 0.01  # of the whole circle
LIGHT, CONTRAST, SATURATION = (0.75, 1.2), (0.7, 1.3), (0.5, 1.4)
GREY, BLURRED, SHARPENED = 0.05, 0.15, 0.15  # probabilities
BLUR = 1.2  # pixels at most


def vary(picture: Image.Image, random: Random, coloured: bool) -> Image.Image:
    """``picture`` (RGBA) turned, sheared, scaled, recoloured, blurred or sharpened; ``coloured`` keeps its hue."""
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
    hue = HUE_OF_COLOURED if coloured else HUE
    picture = F.adjust_hue(picture, random.uniform(-hue, hue))
    picture = F.adjust_brightness(picture, random.uniform(*LIGHT))
    picture = F.adjust_contrast(picture, random.uniform(*CONTRAST))
    grey = not coloured and random.random() < GREY
    return F.adjust_saturation(picture, 0.0 if grey else random.uniform(*SATURATION))
