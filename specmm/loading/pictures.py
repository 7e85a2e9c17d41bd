"""Opens pictures of any source as upright RGB of 8 bits, with transparency on white.

Error messages begin with "must", so that callers can put the file's name before them.
"""

from __future__ import annotations

import io
import sys
import warnings
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from specmm.loading.files import sentence_of

DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
# formats that Pillow only knows of, or that another program would draw
NO_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "PALM", "PDF", "WMF"}
# ComfyUI's workflows are longer than Pillow takes one text for; all texts together stay below this
PngImagePlugin.MAX_TEXT_CHUNK = max(PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY)


def endings() -> set[str]:
    """The endings of picture files, in lower case with their dot: Pillow's and its plugins'."""
    registered = Image.registered_extensions()
    return {ending for ending, kind in registered.items() if kind not in NO_PICTURES}


def packed(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """``image`` as the bytes of a file of a ``kind``, with Pillow's ``options``."""
    data = io.BytesIO()
    image.save(data, format=kind, **options)
    return data.getvalue()


def header(source: str | IO[bytes] | Image.Image, most: int | None = None) -> Image.Image:
    """The picture in a file, not yet decoded, or ``source`` itself if it is a picture.

    Raises ``ValueError`` if it is not a picture or has more than ``most`` pixels (None: Pillow's
    limit, 179 million), and ``OSError`` for a file that cannot be opened.
    """
    most = most or 2 * (Image.MAX_IMAGE_PIXELS or sys.maxsize)
    image = source if isinstance(source, Image.Image) else _opened(source, most)
    width, height = image.size
    if not 0 < width * height <= most:
        image.close()
        raise ValueError(f"must have 1 to {most:,} pixels, got {width} x {height}; scale it down")
    return image


def _opened(file: str | IO[bytes], most: int) -> Image.Image:
    """Pillow's picture of ``file``, not yet decoded; its errors as sentences."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(file)
    except Image.DecompressionBombError as error:
        got = f"more ({error})"
        raise ValueError(f"must have 1 to {most:,} pixels, got {got}; scale it down") from error
    except UnidentifiedImageError as error:
        raise ValueError("must be a picture, got a file of another kind or an empty one") from error
    except Exception as error:  # a damaged header fails in any way
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error about the file, and clear by itself
        got = sentence_of(error)
        raise ValueError(f"must be a picture that can be read, got: {got}") from error


def upright(image: Image.Image) -> Image.Image:
    """``image`` in RGB, turned by its orientation tag; ``ValueError`` if it is damaged."""
    try:
        return rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a damaged file makes a decoder fail in any way
        got = f"a damaged or truncated one ({sentence_of(error)})"
        raise ValueError(f"must be a whole picture, got {got}") from error


def rgb(image: Image.Image) -> Image.Image:
    """``image`` in RGB: transparency on white, the high byte of 16 bits, floats from 0 to 1."""
    if image.mode in DEEP_MODES:
        # Pillow would clip 16 bits at 255, but for those of colours, of which it takes this byte
        values = np.asarray(image)
        values = (values * 255).round() if image.mode == "F" else values >> 8
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
