"""Pictures inside .npz and .npy files, read one by one: a file larger than memory is no trouble.

Shapes: the array [N, H, W, 3] uint8.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

ARRAYS = (".npz", ".npy")
NAMES = ("images", "arr_0")  # ours, and ADM's


def count_pictures(path: Path) -> int:
    """How many pictures ``path`` holds; raises ``ValueError`` unless it holds an array [N, H, W, 3]
    uint8.
    """
    with _array(path) as (_, shape):
        return shape[0]


def stream_pictures(path: Path) -> Iterator[np.ndarray]:
    """The pictures [H, W, 3] of ``path``; raises ``ValueError`` unless it holds an array [N, H, W,
    3] uint8.
    """
    with _array(path) as (file, (count, *shape)):
        for number in range(count):
            data = file.read(math.prod(shape))
            if len(data) < math.prod(shape):
                raise ValueError(
                    f"{path} must hold {count} pictures, got {number} and a part; write it again"
                )
            yield np.frombuffer(data, np.uint8).reshape(shape)


@contextlib.contextmanager
def _array(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """The array's data, positioned at its first byte, and its shape."""
    with contextlib.ExitStack() as stack:
        file = _open(path, stack)
        try:
            version = np.lib.format.read_magic(file)
            header = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = header(file)
        except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
            raise ValueError(
                f"{path} must be a numpy file, got a broken one ({error}); write it again"
            ) from None
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or fortran or not math.prod(shape):
            raise ValueError(
                f"{path} must hold pictures uint8 [N, H, W, 3] in C order, got {dtype} {list(shape)}; "
                "save 0..255 with the channels last"
            )
        yield file, shape


def _open(path: Path, stack: contextlib.ExitStack) -> IO[bytes]:
    if path.suffix == ".npy":
        return stack.enter_context(path.open("rb"))
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} must be a numpy archive, got a broken one ({error}); write it again"
        ) from None
    names = [n.removesuffix(".npy") for n in archive.namelist()]
    chosen = next((n for n in NAMES if n in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise ValueError(
            f"{path} must hold {' or '.join(NAMES)}, or one array, got {', '.join(names)}; save images=…"
        )
    return stack.enter_context(archive.open(f"{chosen}.npy"))
