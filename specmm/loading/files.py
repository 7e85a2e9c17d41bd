"""Files that are written whole or not at all, names for them, and what their errors say.

The command line imports this module before anything else, so it needs nothing but Python.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path


def write_whole(file: Path, data: bytes | Iterable[bytes], durable: bool = False) -> None:
    """Write ``file`` whole, or raise ``OSError`` and leave nothing; ``data`` may come in pieces.

    With ``durable`` its content is on the disk when this returns; its name, after ``sync_folder``.
    """
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as stream:
            stream.writelines([data] if isinstance(data, bytes) else data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def writable(folder: Path, option: str = "--out") -> Path:
    """``folder``, made; raises ``ValueError`` naming ``option`` if nothing can be written there."""
    probe = folder / f".specmm-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder} ({error.strerror}), choose another folder with {option}"
        ) from error
    return folder


def sync_folder(folder: Path) -> None:
    """Wait until the entries of ``folder`` (new names, renames) are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sentence_of(error: Exception) -> str:
    """What ``error`` says to people, on a line: the words of a mistake of theirs, and of any other
    its kind before them.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif not isinstance(error, ValueError | OSError):
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.split())


def slug(text: str) -> str:
    """``text`` as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:48] or "picture"
