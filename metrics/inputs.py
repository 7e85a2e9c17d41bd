"""Pictures from folders, globs, zip, tar, numpy files, arrays or a pipeline; streamed, in order.

Files are decoded in worker processes, one at a time in memory, in the order of their names. How a
file becomes three channels of eight bits is ``DECODING``, which goes into the protocol of what is
measured on the pictures.

Shapes: a picture [H, W, 3] uint8; an array in a file [N, H, W, 3] uint8.
"""

from __future__ import annotations

import contextlib
import glob
import io
import math
import os
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import DataLoader

from specmm.metrics.features import Protocol

Source = str | Path | np.ndarray | Iterable[Any] | Callable[[], Any]
Skipped = list[tuple[str, str]]  # (name, reason) of pictures
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ARRAYS = (".npz", ".npy")
NAMES = ("images", "arr_0")  # of the array in an .npz: ours, and ADM's
DECODING = (
    "RGB 8 bit (high byte of 16); EXIF orientation applied; transparency on white; first frame"
)
FEW = 64  # files that are not worth starting workers for
BLOCK = 16  # files a worker decodes at a time
# SyntaxError: Pillow's for a broken PNG
UNREADABLE = (OSError, ValueError, SyntaxError, zipfile.BadZipFile, Image.DecompressionBombError)


class PictureSource:
    """Pictures [H, W, 3] uint8, read anew at each iteration; a generator can be iterated once.

    ``skipped`` lists (name, reason) of the pictures left out of the last pass, ``files`` where each
    lies, if it is a file or in an archive of files.
    """

    def __init__(
        self,
        read: Callable[[Skipped], Iterator[np.ndarray]],
        count: int,
        files: Sequence[PictureFile] = (),
    ) -> None:
        self._read = read
        self._count = count
        self.files = files
        self.skipped: Skipped = []
        self.protocol: Protocol = {"decoding": DECODING}

    def __iter__(self) -> Iterator[np.ndarray]:
        self.skipped.clear()
        return self._read(self.skipped)

    def __length_hint__(self) -> int:
        return self._count  # bad ones included; 0 where that is not known


def open_pictures(
    source: Source, *, skip_bad: bool = False, workers: int | None = None
) -> PictureSource:
    """The pictures of ``source``.

    A folder (with its subfolders and .tar archives), a glob, a .zip or .tar (as webdataset writes
    it), an .npz or .npy of pictures (``images``, ADM's ``arr_0``, or its only array), a picture's
    file; an array, an iterable of arrays, PIL pictures or pipeline outputs, or a callable for one
    of them, such as ``lambda: pipe(classes)``. ``workers`` processes decode files (default: one a
    core, none for a few files). Raises ``ValueError`` if there is nothing to read, and naming the
    file for a bad picture, unless ``skip_bad`` leaves it out and lists it in ``skipped``.
    """
    if not isinstance(source, str | Path):
        known = len(source) if isinstance(source, np.ndarray | list | tuple) else 0
        return PictureSource(lambda skipped: _flat(source), known)
    path = Path(source)
    if path.suffix in ARRAYS and path.is_file():
        with _array(path) as (_, shape):
            return PictureSource(lambda skipped: _rows(path), shape[0])
    files = _files(str(source), path)
    count = (min(os.cpu_count() or 1, 8) if len(files) > FEW else 0) if workers is None else workers
    return PictureSource(
        lambda skipped: _decoded(files, skip_bad, count, skipped), len(files), files
    )


def _flat(source: Any) -> Iterator[np.ndarray]:
    found = source() if callable(source) else source
    for item in getattr(found, "images", found):
        if hasattr(item, "images"):
            yield from _flat(item)
        else:
            yield np.asarray(item.convert("RGB") if hasattr(item, "convert") else item)


@dataclass(frozen=True)
class PictureFile:
    """A file, ``member`` of the .zip at ``path``, or ``size`` bytes from ``start`` of the .tar."""

    path: Path
    member: str = ""
    start: int = -1
    size: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    def read(self) -> bytes:
        """Its bytes."""
        if self.start >= 0:
            with self.path.open("rb") as file:
                file.seek(self.start)
                return file.read(self.size)
        if self.member:
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(self.member)
        return self.path.read_bytes()


def _decode_all(entries: list[PictureFile]) -> list[tuple[str, np.ndarray | str]]:
    found: list[tuple[str, np.ndarray | str]] = []  # or why not: workers return errors
    for entry in entries:
        try:
            found.append((str(entry), decode(entry.read())))
        except UnidentifiedImageError:
            found.append((str(entry), "no picture format that Pillow knows"))
        except UNREADABLE as error:
            found.append((str(entry), " ".join(str(error).split())))
    return found


def decode(data: bytes) -> np.ndarray:
    """The picture [H, W, 3] uint8 in the bytes of a file; ``ValueError`` for 32-bit pixels."""
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
        raise ValueError(f"pixels of 32 bits (mode {image.mode}) of unknown range: save 8 or 16")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def _decoded(
    files: list[PictureFile], skip_bad: bool, workers: int, skipped: Skipped
) -> Iterator[np.ndarray]:
    options: dict[str, Any] = {"batch_size": BLOCK, "num_workers": workers}
    for block in DataLoader(files, collate_fn=_decode_all, **options):  # type: ignore[arg-type]
        for name, picture in block:
            if not isinstance(picture, str):
                yield picture
            elif skip_bad:
                skipped.append((name, picture))
            else:
                raise ValueError(
                    f"{name} must be a picture, got {picture}; repair or remove it, or skip bad "
                    "ones (--skip-bad, skip_bad=True)"
                )


def _files(source: str, path: Path) -> list[PictureFile]:
    if path.is_dir():
        suffixes = (*SUFFIXES, ".tar")
        inside = (f for f in path.rglob("*") if f.suffix.lower() in suffixes and f.is_file())
        files = [(f, f.suffix == ".tar") for f in sorted(inside)]
    elif path.is_file():
        files = [(path, path.suffix in (".zip", ".tar"))]
    else:
        matching = sorted(glob.glob(source, recursive=True))
        files = [(Path(f), False) for f in matching if Path(f).is_file()]
    found: list[PictureFile] = []
    for file, is_archive in files:
        found += _archived(file) if is_archive else [PictureFile(file)]
    if not found:
        raise ValueError(
            f"{source} must be or hold pictures ({', '.join(SUFFIXES)}), got none; "
            "pass a folder, a glob, a .zip, a .tar or an .npz"
        )
    return found


def _archived(path: Path) -> list[PictureFile]:
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as packed:
                found = [PictureFile(path, name) for name in packed.namelist()]
        else:
            with tarfile.open(path, "r:") as tar:  # uncompressed: members are read at their offset
                files = [m for m in tar if m.isfile()]
            found = [PictureFile(path, m.name, m.offset_data, m.size) for m in files]
    except (zipfile.BadZipFile, tarfile.TarError, OSError) as error:
        raise _broken(path, f"{path.suffix} archive", error) from None
    pictures = (e for e in found if Path(e.member).suffix.lower() in SUFFIXES)
    ours = (e for e in pictures if not e.member.startswith("__MACOSX/"))
    return sorted(ours, key=lambda e: e.member)


def _broken(path: Path, what: str, error: Exception) -> ValueError:
    return ValueError(f"{path} must be a {what}, got a broken one ({error}); write it again")


def _rows(path: Path) -> Iterator[np.ndarray]:
    with _array(path) as (file, (count, *shape)):
        for number in range(count):  # one by one: the file may be larger than memory
            data = file.read(math.prod(shape))
            if len(data) < math.prod(shape):
                raise ValueError(f"{path} must hold {count} pictures, got {number} and a part")
            yield np.frombuffer(data, np.uint8).reshape(shape)


@contextlib.contextmanager
def _array(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    with contextlib.ExitStack() as stack:
        file = _open_array(path, stack)
        try:
            shape, fortran, dtype = array_header(file)
        except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
            raise _broken(path, "numpy file", error) from None
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or fortran or not math.prod(shape):
            raise ValueError(
                f"{path} must hold pictures uint8 [N, H, W, 3] in C order, got {dtype} "
                f"{list(shape)}; save 0..255 with the channels last"
            )
        yield file, shape


def array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of an array in numpy's format, whose data are read next.

    Raises ``ValueError`` and ``EOFError`` for anything else.
    """
    formats = np.lib.format
    first = formats.read_magic(file) == (1, 0)
    read = formats.read_array_header_1_0 if first else formats.read_array_header_2_0
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
    return found


def _open_array(path: Path, stack: contextlib.ExitStack) -> IO[bytes]:
    if path.suffix == ".npy":
        return stack.enter_context(path.open("rb"))
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except zipfile.BadZipFile as error:
        raise _broken(path, "numpy archive", error) from None
    names = [n.removesuffix(".npy") for n in archive.namelist()]
    chosen = next((n for n in NAMES if n in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        held = ", ".join(names)
        raise ValueError(f"{path} must hold {' or '.join(NAMES)}, or one array, got {held}")
    if f"{chosen}.npy" not in archive.namelist():
        raise ValueError(f"{path} must hold an array (.npy), got {chosen}; save it by numpy.savez")
    return stack.enter_context(archive.open(f"{chosen}.npy"))
