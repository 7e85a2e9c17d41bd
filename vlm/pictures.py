"""Pictures as users give them, opened: turned upright, in RGB, transparency on white."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Source = str | Path | Image.Image
MOST_PIXELS = 80_000_000  # a larger picture takes more than 240 MB before it is scaled down
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")


def open_image(source: Source) -> Image.Image:
    """RGB picture of a file or a PIL image, turned as its camera says, transparency on white.

    An animation gives its first frame; 16 bits are scaled to 8. Raises ``ValueError`` for what is
    no picture, is damaged, or has more than ``MOST_PIXELS`` pixels, as its header tells before
    anything is decoded.
    """
    name = "picture" if isinstance(source, Image.Image) else str(source)
    image = source if isinstance(source, Image.Image) else _read_header(name)
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        image.close()
        raise ValueError(
            f"{name} must have 1 to {MOST_PIXELS:,} pixels, got {width} x {height}; "
            "scale it down before asking"
        )
    try:
        return rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a damaged file makes a decoder fail in any way
        raise ValueError(
            f"{name} must be a whole picture, got a damaged or truncated one ({error})"
        ) from error


def _read_header(name: str) -> Image.Image:
    """The file opened, not decoded; Pillow's own limit is higher than ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(name)
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{name} must have 1 to {MOST_PIXELS:,} pixels ({error}); scale it down"
        ) from error
    except Exception as error:
        # A damaged header fails in any way; the error of a missing file is clear by itself.
        if isinstance(error, OSError) and not isinstance(error, UnidentifiedImageError):
            raise
        raise ValueError(
            f"{name} must be a picture, got a file of another kind or an empty one"
        ) from error


def rgb(image: Image.Image) -> Image.Image:
    """``image`` in RGB: transparency on white, 16 bits scaled to 8."""
    if image.mode in DEEP_MODES:
        # Pillow would clip 16 bits at 255; floats are taken to run from 0 to 1.
        values = np.asarray(image, dtype=np.float64)
        values = values * 255 if image.mode == "F" else values / 257
        return Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
