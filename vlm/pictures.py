"""Opens pictures in any form: turned upright, converted to RGB, transparency on white.

Shape letters: H and W pixels of the sides, C channels.
"""

from __future__ import annotations

import io
import urllib.request
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from specmm.extending.kinds import shown
from specmm.loading.files import OF_PICTURES
from specmm.loading.pictures import header, upright

Source: TypeAlias = str | Path | bytes | BinaryIO | Image.Image | npt.NDArray[Any] | Tensor
MOST_PIXELS = 80_000_000  # a larger picture takes more than 240 MB before it is scaled down
MOST_BYTES = 200_000_000  # a picture's limit from the network
PATIENCE = 30  # seconds that a server may keep silent


def open_image(source: Source) -> Image.Image:
    """RGB picture of a file, its bytes, an address (http, https, data), a PIL image, or an array or
    tensor, turned upright by its metadata, transparency on white.

    An animation gives its first frame; of 16 bits the high byte. Raises ``ValueError`` for a source
    that is not a picture, is damaged, or has more than ``MOST_PIXELS`` pixels by its header, before
    decoding.
    """
    file, name = _named(source)
    try:
        return upright(header(file, MOST_PIXELS))
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _named(source: Source) -> tuple[str | io.BytesIO | Image.Image, str]:
    """The file or picture, and its name in messages."""
    if isinstance(source, Image.Image):
        return source, "picture"
    if isinstance(source, np.ndarray | Tensor):
        return from_numbers(source), "picture"
    read = source if isinstance(source, bytes) else getattr(source, "read", None)
    if read is not None:
        return io.BytesIO(read if isinstance(read, bytes) else read()), "picture"
    if not isinstance(source, str | Path):
        raise ValueError(
            "picture must be a file, its bytes, an address, a PIL image, an array or a tensor, "
            f"got {shown(source)}"
        )
    if isinstance(source, str) and OF_PICTURES.match(source):
        return io.BytesIO(fetched(source)), source[:60]
    return str(source), str(source)


def from_numbers(numbers: npt.NDArray[Any] | Tensor) -> Image.Image:
    """The picture of an array or tensor [H, W], [H, W, C] or [C, H, W] of 1, 3 or 4 channels: bytes
    from 0 to 255, or floats from 0 to 1.

    If both layouts are possible, an array has its channels last, a tensor first. Raises
    ``ValueError`` for other shapes and values.
    """
    first = isinstance(numbers, Tensor)
    array = _as_array(numbers)
    if array.ndim == 3:
        layouts = [0, 2] if first else [2, 0]
        axis = next((axis for axis in layouts if array.shape[axis] in (1, 3, 4)), None)
        array = array if axis is None else np.moveaxis(array, axis, 2)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ValueError(
            "picture must have the shape [height, width, channels] or [channels, height, width] "
            f"with 1, 3 or 4 channels, got {list(array.shape)}"
        )
    pixels = _bytes(array)
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels)


def _as_array(numbers: npt.NDArray[Any] | Tensor) -> npt.NDArray[Any]:
    if not isinstance(numbers, Tensor):
        return numbers
    here = numbers.detach().cpu()
    array: npt.NDArray[Any] = (here.float() if here.is_floating_point() else here).numpy()
    return array


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """``array`` as uint8; raises ``ValueError`` for values out of range."""
    floats = np.issubdtype(array.dtype, np.floating)
    most = 1 if floats else 255
    if array.size and not 0 <= array.min() <= array.max() <= most:
        raise ValueError(
            f"picture must hold {'floats from 0 to 1' if floats else 'integers from 0 to 255'}, "
            f"got {array.min():g} to {array.max():g}"
        )
    scaled = array * 255.0 if floats else array
    return scaled.round().astype(np.uint8) if floats else scaled.astype(np.uint8)


def fetched(address: str) -> bytes:
    """The bytes at ``address``; raises ``ValueError`` if it cannot be read."""
    request = urllib.request.Request(address, headers={"User-Agent": "specmm"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            content: bytes = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"picture {address[:60]} must be readable from here, got {error}; download it first"
        ) from error
    if len(content) > MOST_BYTES:
        raise ValueError(f"picture {address[:60]} must have at most {MOST_BYTES:,} bytes, got more")
    return content
