"""Pictures of noise, the same in every process and order of tests."""

import numpy as np
from PIL import Image


def noisy(size: tuple[int, int], spread: int) -> Image.Image:
    """A grey picture of ``size`` (width, height), around 128 as ``Image.effect_noise`` draws."""
    drawn = np.random.default_rng([*size, spread]).normal(128, spread, size[::-1])
    return Image.fromarray(drawn.clip(0, 255).astype(np.uint8))
