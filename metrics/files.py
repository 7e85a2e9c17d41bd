"""Picture files, in folders or inside archives, decoded to three channels of eight bits.

Shapes: a picture [H, W, 3] uint8.
"""

from __future__ import annotations

import io
import tarfile
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import Dataset

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
DECODING = (
    "RGB 8 bit (high byte of 16); EXIF orientation applied; transparency on white; first frame"
)


@dataclass(frozen=True)
class Entry:
    """One picture file: ``path``, or ``member`` of the .zip at ``path``, or ``size`` bytes from
    ``start`` of a .tar.
    """

    path: Path
    member: str = ""
    start: int = -1
    size: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    def read(self) -> bytes:
        """The file's bytes."""
        if self.start >= 0:
            with self.path.open("rb") as file:
                file.seek(self.start)
                return file.read(self.size)
        if self.member:
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(self.member)
        return self.path.read_bytes()


class PictureFiles(Dataset[tuple[str, np.ndarray | str]]):
    """Files by number: (name, picture [H, W, 3]), or (name, why it cannot be read)."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> tuple[str, np.ndarray | str]:
        """Read and decode file ``number``; what is wrong with it is told, not raised, since workers
        do this.
        """
        entry = self.entries[number]
        try:
            return str(entry), decode(entry.read())
        except UnidentifiedImageError:
            return str(entry), "no picture format that Pillow knows"
        except (
            OSError,
            ValueError,
            SyntaxError,
            zipfile.BadZipFile,
            Image.DecompressionBombError,
        ) as error:
            return str(entry), " ".join(
                str(error).split()
            )  # SyntaxError: Pillow's for a broken PNG


def decode(data: bytes) -> np.ndarray:
    """The picture [H, W, 3] uint8 in the bytes of a file, as ``DECODING`` says.

    Raises what Pillow raises for broken data, and ``ValueError`` for 32-bit pixels and for more
    pixels than Pillow takes to be sane (``PIL.Image.MAX_IMAGE_PIXELS``).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data)) as image:
                return _rgb(ImageOps.exif_transpose(image))
        except Image.DecompressionBombWarning as error:
            raise ValueError(str(error)) from None


def _rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"pixels of 32 bits (mode {image.mode}), whose white nobody knows: save it with 8 or 16"
        )
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def archive_entries(path: Path) -> list[Entry]:
    """The picture files inside a .zip or .tar, by name; raises ``ValueError`` for a corrupt
    archive.
    """
    try:
        found = _zip_entries(path) if path.suffix == ".zip" else _tar_entries(path)
    except (zipfile.BadZipFile, tarfile.TarError, OSError) as error:
        raise ValueError(
            f"{path} must be a {path.suffix} archive, got a broken one ({error}); pack it again"
        ) from None
    return sorted((e for e in found if _is_picture(e.member)), key=lambda e: e.member)


def _is_picture(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith("__MACOSX/")


def _zip_entries(path: Path) -> list[Entry]:
    with zipfile.ZipFile(path) as archive:
        return [Entry(path, name) for name in archive.namelist()]


def _tar_entries(path: Path) -> list[Entry]:
    with tarfile.open(
        path, "r:"
    ) as archive:  # uncompressed, so that members can be read at their offset
        return [Entry(path, m.name, m.offset_data, m.size) for m in archive if m.isfile()]
