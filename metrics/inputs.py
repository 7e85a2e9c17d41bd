"""Pictures from wherever they are: folders, globs, zip, tar, numpy files, arrays, a pipeline;
streamed, in order.

Files are decoded in worker processes, one at a time in memory, in the order of their names. How a
file becomes three channels of eight bits is ``DECODING``, which goes into the protocol of what is
measured on the pictures.

Shapes: a picture [H, W, 3] uint8.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from specmm.metrics.features import Protocol
from specmm.metrics.files import DECODING, SUFFIXES, Entry, PictureFiles, archive_entries
from specmm.metrics.numpy_files import ARRAYS, count_pictures, stream_pictures

Source = str | Path | np.ndarray | Iterable[Any] | Callable[[], Any]
FEW = 64  # files that are not worth starting workers for
BLOCK = 16  # files a worker decodes at a time


class PictureSource:
    """Pictures [H, W, 3] uint8, read anew each time they are iterated; a generator can be iterated
    once.

    ``skipped`` lists (name, reason) of the pictures left out of the last pass.
    """

    def __init__(
        self, read: Callable[[list[tuple[str, str]]], Iterator[np.ndarray]], count: int = 0
    ) -> None:
        self._read, self._count = read, count
        self.skipped: list[tuple[str, str]] = []
        self.protocol: Protocol = {"decoding": DECODING}

    def __iter__(self) -> Iterator[np.ndarray]:
        """Read the pictures; raises ``ValueError`` naming the first that cannot be read, unless
        they are skipped.
        """
        self.skipped.clear()
        return self._read(self.skipped)

    def __length_hint__(self) -> int:
        """How many pictures there are, bad ones included; 0 where nobody knows."""
        return self._count


def open_pictures(
    source: Source, *, skip_bad: bool = False, workers: int | None = None
) -> PictureSource:
    """The pictures of ``source``.

    A folder (with its subfolders and .tar archives), a glob, a .zip or .tar (as webdataset writes
    it), an .npz or .npy of pictures [N, H, W, 3] uint8 (``images``, ``arr_0`` as ADM writes it, or
    its only array), one picture's file; an array, an iterable of arrays, PIL pictures or pipeline
    outputs, or a callable that gives one of them, such as ``lambda: pipe(classes)``. ``workers``
    processes decode files (default: one a core, none for a few files).

    Bad pictures raise ``ValueError`` naming the file, or with ``skip_bad`` are left out and listed
    in ``skipped``. Raises ``ValueError`` where there is nothing to read.
    """
    if not isinstance(source, str | Path):
        return PictureSource(lambda skipped: _flat(source), _length(source))
    path = Path(source)
    if path.suffix in ARRAYS and path.is_file():
        return PictureSource(lambda skipped: stream_pictures(path), count_pictures(path))
    files = PictureFiles(_entries(str(source), path))
    count = (min(os.cpu_count() or 1, 8) if len(files) > FEW else 0) if workers is None else workers
    return PictureSource(lambda skipped: _decoded(files, skip_bad, count, skipped), len(files))


def _entries(source: str, path: Path) -> list[Entry]:
    """The picture files of a folder, an archive, a glob or a single file; raises ``ValueError`` for
    none.
    """
    if path.is_dir():
        files = sorted(
            f for f in path.rglob("*") if f.suffix.lower() in (*SUFFIXES, ".tar") and f.is_file()
        )
        found = [
            entry
            for f in files
            for entry in (archive_entries(f) if f.suffix == ".tar" else [Entry(f)])
        ]
    elif path.is_file():
        found = archive_entries(path) if path.suffix in (".zip", ".tar") else [Entry(path)]
    else:
        found = [
            Entry(Path(f)) for f in sorted(glob.glob(source, recursive=True)) if Path(f).is_file()
        ]
    if not found:
        raise ValueError(
            f"{source} must be or hold pictures ({', '.join(SUFFIXES)}), got none; "
            "pass a folder, a glob, a .zip, a .tar or an .npz"
        )
    return found


def _decoded(
    files: PictureFiles, skip_bad: bool, workers: int, skipped: list[tuple[str, str]]
) -> Iterator[np.ndarray]:
    for block in DataLoader(files, batch_size=BLOCK, num_workers=workers, collate_fn=list):
        for name, picture in block:
            if not isinstance(picture, str):
                yield picture
            elif skip_bad:
                skipped.append((name, picture))
            else:
                raise ValueError(
                    f"{name} must be a picture, got {picture}; repair or remove it, or skip bad ones "
                    "(--skip-bad, skip_bad=True)"
                )


def _flat(source: Any) -> Iterator[np.ndarray]:
    """The pictures of an array, an iterable, a pipeline's output or what a callable gives, one by
    one.
    """
    found = source() if callable(source) else source
    found = getattr(found, "images", found)
    for item in found:
        if hasattr(item, "images"):
            yield from _flat(item)
        else:
            yield np.asarray(item.convert("RGB") if hasattr(item, "convert") else item)


def _length(source: Any) -> int:
    return len(source) if isinstance(source, np.ndarray | list | tuple) else 0
