"""Pictures from folders, globs, zip, tar, numpy files, arrays or a pipeline; streamed, in order.

Files are decoded in worker processes, one at a time in memory, in the order of their names.
``DECODING`` describes how a file becomes three channels of eight bits, and goes into the protocol
of measurements. Pictures are files with an ending that Pillow knows; every other file is counted
with the reason for leaving it out, so that the counts add up.

Shapes: a picture [H, W, 3] uint8; an array in a file [N, H, W, 3] uint8.
"""

from __future__ import annotations

import contextlib
import glob
import io
import math
import os
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch.utils.data import DataLoader

from specmm.loading.files import ADDRESS, files_below, hidden, sentence_of
from specmm.loading.pictures import endings, header, upright
from specmm.metrics.features import Protocol

Source = str | Path | np.ndarray | Iterable[Any] | Callable[[], Any]
Skipped = list[tuple[str, str]]  # (name, reason) of pictures
ARRAYS = (".npz", ".npy")
ARCHIVES = (".zip", ".tar")
PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")  # no member is read without the rest
NAMES = ("images", "arr_0")  # an .npz's array: ours, and ADM's
DECODING = (
    "RGB 8 bit (high byte of 16); EXIF orientation applied; transparency on white; first frame"
)
FEW = 64  # files that are not worth starting workers for
BLOCK = 16  # files a worker decodes at a time
METHODS = {9: "deflate64", 93: "zstd", 95: "xz", 96: "jpeg"}  # a .zip's that may lack support
LOCAL_HEADER = 30  # bytes of it before the member's name in a .zip


class PictureSource:
    """Pictures [H, W, 3] uint8, read anew at each iteration; a generator can be iterated once.

    ``files`` are the pictures' files and archive members, if they come from files; ``left_out``
    counts other files by the reason for leaving them out. ``skipped`` lists (name, reason) of the
    pictures that could not be read in the last pass.
    """

    def __init__(
        self,
        read: Callable[[Skipped], Iterator[np.ndarray]],
        count: int,
        files: Sequence[PictureFile] = (),
        left_out: Counter[str] | None = None,
    ) -> None:
        self._read = read
        self._count = count
        self.files = files
        self.left_out = left_out or Counter()
        self.skipped: Skipped = []
        self.protocol: Protocol = {"decoding": DECODING}

    def __iter__(self) -> Iterator[np.ndarray]:
        self.skipped.clear()
        return self._read(self.skipped)

    def __length_hint__(self) -> int:
        return self._count  # bad ones included; 0 where that is not known

    def counts(self) -> dict[str, int]:
        """The number of files, of pictures, and of files left out by reason.

        Empty if the pictures do not come from files.
        """
        if not self.files:
            return {}
        bad = {"unreadable": len(self.skipped)} if self.skipped else {}
        pictures = len(self.files) - len(self.skipped)
        files = len(self.files) + self.left_out.total()
        return {"files": files, "pictures": pictures, **bad, **self.left_out}


def open_pictures(
    source: Source, *, skip_bad: bool = False, workers: int | None = None
) -> PictureSource:
    """The pictures of ``source``.

    A folder (with its subfolders, linked ones too, and .tar archives), a glob (of archives, too), a
    .zip or .tar (as webdataset writes it), an .npz or .npy of pictures (``images``, ADM's
    ``arr_0``, or its only array), a picture's file; an array, an iterable of arrays, PIL pictures
    or pipeline outputs, or a callable for one of them, such as ``lambda: pipe(classes)``.
    ``workers`` processes decode files (default: one a core, none for a few files). Raises
    ``ValueError`` if there is nothing to read, and naming the file for a bad picture, unless
    ``skip_bad`` leaves it out and lists it in ``skipped``.
    """
    if not isinstance(source, str | Path):
        length = len(source) if isinstance(source, np.ndarray | list | tuple) else 0
        return PictureSource(lambda skipped: _flat(source), length)
    path = Path(source)
    if path.suffix.lower() in ARRAYS and path.is_file():
        with _array(path) as (_, shape):
            return PictureSource(lambda skipped: _rows(path), shape[0])
    files, left_out = picture_files(str(source), skip_bad=skip_bad)
    count = (min(os.cpu_count() or 1, 8) if len(files) > FEW else 0) if workers is None else workers
    return PictureSource(
        lambda skipped: _decoded(files, skip_bad, count, skipped), len(files), files, left_out
    )


def _flat(source: Any) -> Iterator[np.ndarray]:
    """The pictures in arrays, PIL pictures, pipeline outputs, or a function that returns some."""
    items = source() if callable(source) else source
    for item in getattr(items, "images", items):
        if hasattr(item, "images"):
            yield from _flat(item)
        else:
            yield np.asarray(item.convert("RGB") if hasattr(item, "convert") else item)


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A file, or the ``member`` at byte ``start`` of the archive at ``place``.

    In a .tar it has ``size`` bytes; in a .zip, ``packed`` holds flags, compression, CRC, packed and
    unpacked size.
    """

    place: str
    member: str = ""
    start: int = 0
    size: int = -1
    packed: tuple[int, int, int, int, int] | None = None

    def __str__(self) -> str:
        return f"{self.place}:{self.member}" if self.member else self.place

    @property
    def path(self) -> Path:
        """The path of the file, or of its archive."""
        return Path(self.place)

    def read(self) -> bytes:
        """Its bytes; ``ValueError`` if it is encrypted or its compression is not supported.

        The archive's directory, which may be longer than a picture, is not read again.
        """
        with open(self.place, "rb") as file:
            file.seek(self.start)
            if self.packed is None:
                return file.read(self.size)
            info = zipfile.ZipInfo(self.member)
            flags, info.compress_type, info.CRC, info.compress_size, info.file_size = self.packed
            if flags & 1:
                raise ValueError("must not be encrypted; unpack the archive with its password")
            local = file.read(LOCAL_HEADER)
            lengths = (int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
            file.seek(sum(lengths), os.SEEK_CUR)  # skip the name and the extra fields
            try:
                return zipfile.ZipExtFile(file, "r", info).read()
            except NotImplementedError:
                got = f"method {info.compress_type} ({METHODS.get(info.compress_type, 'unknown')})"
                raise ValueError(f"must be packed as Python can unpack it, got {got}") from None


def _decode_all(entries: list[PictureFile]) -> list[tuple[str, np.ndarray | str]]:
    """The pictures of ``entries`` by name, or the reason why one cannot be read."""
    decoded: list[tuple[str, np.ndarray | str]] = []  # or why not: workers return errors
    for entry in entries:
        try:
            decoded.append((str(entry), decode(entry.read())))
        except Exception as error:  # a damaged file makes a decoder fail in any way
            decoded.append((str(entry), sentence_of(error)))
    return decoded


def decode(data: bytes) -> np.ndarray:
    """The picture [H, W, 3] uint8 in the bytes of a file; ``ValueError`` for 32-bit pixels."""
    with header(io.BytesIO(data)) as image:
        if image.mode in ("I", "F"):
            raise ValueError(
                f"must be a picture of 8 or 16 bits, got pixels of 32 bits (mode {image.mode}) of "
                "unknown range"
            )
        return np.asarray(upright(image))


def _decoded(
    files: list[PictureFile], skip_bad: bool, workers: int, skipped: Skipped
) -> Iterator[np.ndarray]:
    """The pictures of ``files``; unreadable ones go to ``skipped``, or raise ``ValueError``."""
    options: dict[str, Any] = {"batch_size": BLOCK, "num_workers": workers}
    for block in DataLoader(files, collate_fn=_decode_all, **options):  # type: ignore[arg-type]
        for name, picture in block:
            if not isinstance(picture, str):
                yield picture
            elif skip_bad:
                skipped.append((name, picture))
            else:
                raise ValueError(
                    f"{name} {picture}; repair or remove it, or skip bad ones (--skip-bad, "
                    "skip_bad=True)"
                )
    if len(skipped) == len(files):
        raise ValueError(
            f"one of {len(files)} pictures must be readable, got {': '.join(skipped[0])}"
        )


def picture_files(source: str, *, skip_bad: bool = False) -> tuple[list[PictureFile], Counter[str]]:
    """The pictures in ``source`` (a folder, archive, glob or single file), ordered by name, and the
    number of other files by the reason for leaving them out.

    Raises ``ValueError`` where there are none, and for a broken archive; with ``skip_bad`` one
    in a folder is left out.
    """
    suffixes = endings()
    left_out: Counter[str] = Counter()
    files: list[PictureFile] = []
    for path, reason in _places(source, suffixes):
        if reason:
            left_out[reason] += 1
        elif Path(path).suffix.lower() not in ARCHIVES:
            files.append(PictureFile(path))
        else:
            try:
                files += _archived(path, suffixes, left_out)
            except ValueError:
                if not skip_bad or path == source:
                    raise
                left_out["broken archive"] += 1
    if not files:
        others = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        got = "an address" if ADDRESS.match(source) else f"none but {others}" if others else "none"
        raise ValueError(
            f"{source} must be or hold pictures (.png, .jpg or what else Pillow reads), got {got}; "
            "pass a folder, a glob, a .zip, a .tar or an .npz of this machine"
        )
    return files, left_out


def _places(source: str, suffixes: set[str]) -> Iterator[tuple[str, str]]:
    """Pictures' files and archives at ``source``, each with the reason to leave it out, or ""."""
    if os.path.isdir(source):
        inside = {*suffixes, ".tar"}
        for path, reason in files_below(source):
            yield path, reason or _other(path, inside)
    elif os.path.isfile(source):
        if Path(source).suffix.lower() in PACKED:
            raise ValueError(f"{source} must be unpacked, or made a .zip or an uncompressed .tar")
        yield source, ""
    else:  # a glob's matches count, whatever their endings
        yield from ((f, "") for f in sorted(glob.glob(source, recursive=True)) if os.path.isfile(f))


def _other(name: str, suffixes: set[str]) -> str:
    """The ending of the file ``name`` if it is not among the ``suffixes`` endings, else ""."""
    ending = os.path.splitext(name)[1].lower()
    return "" if ending in suffixes else f"ending {ending}" if ending else "without ending"


def _archived(path: str, suffixes: set[str], left_out: Counter[str]) -> list[PictureFile]:
    """The pictures in an archive, by name; others are counted in ``left_out``."""
    kind = Path(path).suffix.lower()
    files: dict[str, PictureFile] = {}
    links: dict[str, str] = {}
    with whole(path, f"{kind} archive", Exception):  # a damaged one fails in any way
        for entry, link in (_zipped if kind == ".zip" else _tarred)(path):
            if entry.member in files or entry.member in links:
                left_out["replaced by a later one"] += 1
            for kept in (files, links):
                kept.pop(entry.member, None)
            if link is None:
                files[entry.member] = entry
            else:
                links[entry.member] = link
    for name in links:
        target, steps = links[name], 0
        while target in links and steps < len(links):
            target, steps = links[target], steps + 1
        if target in files:
            files[name] = replace(files[target], member=name)
        else:
            left_out["link to no file"] += 1
    reasons = {name: "hidden" if hidden(name) else _other(name, suffixes) for name in files}
    left_out.update(filter(None, reasons.values()))
    return [files[name] for name in sorted(files) if not reasons[name]]


def _zipped(path: str) -> Iterator[tuple[PictureFile, str | None]]:
    """The files in a .zip, and the targets of links."""
    with zipfile.ZipFile(path) as packed:
        for info in packed.infolist():
            sizes = (info.CRC, info.compress_size, info.file_size)
            about = (info.flag_bits, info.compress_type, *sizes)
            entry = PictureFile(path, info.filename, info.header_offset, packed=about)
            if stat.S_ISLNK(info.external_attr >> 16):
                yield entry, _beside(info.filename, packed.read(info).decode())
            elif not info.is_dir():
                yield entry, None


def _tarred(path: str) -> Iterator[tuple[PictureFile, str | None]]:
    """The files in an uncompressed .tar, and the targets of links."""
    with tarfile.open(path, "r:") as tar:
        while (info := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a million would be gigabytes
            entry = PictureFile(path, info.name, info.offset_data, info.size)
            if info.islnk():
                yield entry, info.linkname
            elif info.issym():
                yield entry, _beside(info.name, info.linkname)
            elif info.isfile():
                yield entry, None


def _beside(name: str, target: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(name), target))


@contextlib.contextmanager
def whole(path: str | Path, what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of the block, also ``errors``, into a ``ValueError``: ``path`` is no ``what``."""
    damage: tuple[type[Exception], ...] = (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        EOFError,
        *errors,
    )
    try:
        yield
    except damage as error:
        got = f"a broken one ({sentence_of(error)})"
        raise ValueError(f"{path} must be a whole {what}, got {got}; write it again") from None


def _rows(path: Path) -> Iterator[np.ndarray]:
    with _array(path) as (file, (count, *shape)):
        for number in range(count):  # one by one: the file may be larger than memory
            data = file.read(math.prod(shape))
            if len(data) < math.prod(shape):
                raise ValueError(f"{path} must hold {count} pictures, got {number} and a part")
            yield np.frombuffer(data, np.uint8).reshape(shape)


@contextlib.contextmanager
def _array(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """The opened array of pictures in ``path``, read up to its numbers, and its shape."""
    with contextlib.ExitStack() as stack, whole(path, "numpy file"):
        file = _open_array(path, stack)
        with whole(path, "numpy file", ValueError):
            shape, fortran, dtype = array_header(file)
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or fortran or not math.prod(shape):
            raise ValueError(
                f"{path} must hold pictures uint8 [N, H, W, 3] in C order, got {dtype} "
                f"{list(shape)}; save 0..255 with the channels last"
            )
        yield file, shape


def array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of an array in numpy's format; the data come next in ``file``.

    Raises ``ValueError`` and ``EOFError`` for anything else.
    """
    formats = np.lib.format
    first = formats.read_magic(file) == (1, 0)
    read = formats.read_array_header_1_0 if first else formats.read_array_header_2_0
    facts: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(file)
    return facts


def _open_array(path: Path, stack: contextlib.ExitStack) -> IO[bytes]:
    """The array's file inside ``path`` (.npy or .npz), opened."""
    if path.suffix.lower() == ".npy":
        return stack.enter_context(path.open("rb"))
    archive = stack.enter_context(zipfile.ZipFile(path))
    names = [n.removesuffix(".npy") for n in archive.namelist()]
    chosen = next((n for n in NAMES if n in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        listed = ", ".join(names)
        raise ValueError(f"{path} must hold {' or '.join(NAMES)}, or one array, got {listed}")
    if f"{chosen}.npy" not in archive.namelist():
        raise ValueError(f"{path} must hold an array (.npy), got {chosen}; save it by numpy.savez")
    return stack.enter_context(archive.open(f"{chosen}.npy"))
