"""Writes files completely or not at all, finds files, reads lines, and formats errors.

The command line imports this module before anything else, so it needs nothing but Python.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

JSON_LINES = (".jsonl", ".ndjson")
JSON = json.JSONDecoder()
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/")  # a Path's has a single slash
OF_PICTURES = re.compile(r"https?://|data:image/", re.IGNORECASE)
# what file systems answer to a call that they lack: some of NFS, CIFS and FUSE
LACKING = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
STORAGE = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "huggingface_hub")


def place(name: str) -> Path:
    """The file or folder ``name``. For an address of object storage, ``s3://bucket/job``, it is a
    ``UPath`` of universal_pathlib, which is not a ``Path`` but has its interface.

    Raises ``ValueError`` for an unknown kind of address, and if the package that reads it is not
    installed.
    """
    from specmm.loading.extras import install

    if not ADDRESS.match(name):
        return Path(name)
    try:
        from upath import UPath

        path = UPath(name, use_listings_cache=False)  # other processes write there, too
        if not path.fs.unstrip_protocol(path.path).partition("://")[2].strip("/"):
            raise ValueError("no bucket")
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} needs {error.name}, run: {install('storage')}") from error
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{name} must be a path, or an address such as s3://bucket/job, got: {error}"
        ) from error
    return path


@contextmanager
def reached(folder: Path) -> Iterator[None]:
    """Context that turns errors of object storage libraries into ``OSError`` naming ``folder``."""
    try:
        yield
    except Exception as error:
        if isinstance(folder, Path) or type(error).__module__.split(".")[0] not in STORAGE:
            raise
        raise OSError(f"{folder} cannot be used: {sentence_of(error)}") from error


@contextmanager
def whole(file: Path, durable: bool = False) -> Iterator[IO[bytes]]:
    """Context with a stream; at its end ``file`` holds all written data, or is unchanged.

    See :func:`write_whole`.
    """
    if not isinstance(file, Path):
        with tempfile.NamedTemporaryFile() as stream, reached(file):
            yield stream
            stream.flush()
            file.fs.put_file(stream.name, file.path)
        return
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(file: Path, data: bytes | Iterable[bytes], durable: bool = False) -> None:
    """Write ``file`` completely, or raise ``OSError`` and leave nothing; ``data`` may come in
    pieces.

    With ``durable`` its content is on disk when this returns; its name is after ``sync_folder``.
    """
    if isinstance(data, bytes) and not isinstance(file, Path):
        with reached(file):
            file.fs.pipe_file(file.path, data)
        return
    with whole(file, durable) as stream:
        stream.writelines([data] if isinstance(data, bytes) else data)


def make_folder(folder: Path) -> None:
    """Make ``folder`` unless it exists; object storage has no folders."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)


def hidden(name: str) -> bool:
    """Whether notebooks or macOS left the file ``name`` in a folder or archive."""
    parts = name.split("/")
    return "__MACOSX" in parts or any(p.startswith(".") and p not in (".", "..") for p in parts)


def files_below(folder: str) -> Iterator[tuple[str, str]]:
    """The files in ``folder`` and its (also linked) subfolders, as paths ordered by name, each with
    a reason to leave it out, or "".
    """
    length = len(os.path.join(folder, ""))
    for path, reason in _walked(folder, []):
        yield path, reason or ("hidden" if hidden(path[length:]) else "")


def _walked(folder: str, above: list[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """As ``files_below``; ``above`` are the parent folders, by device and number: following a link
    to one of them would never end.
    """
    about = os.stat(folder)
    here = [*above, (about.st_dev, about.st_ino)]
    if here[-1] in above:
        yield folder, "link to a folder above"
        return
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        if os.path.isdir(entry.path):  # unlike the entry's own, False for a link to itself
            yield from _walked(entry.path, here)
        else:
            linked = "link to no file" if entry.is_symlink() else "no regular file"
            yield entry.path, "" if os.path.isfile(entry.path) else linked


def files_in(folder: Path) -> Iterator[Path]:
    """All files below ``folder``, in no order."""
    if isinstance(folder, Path):
        return (file for file in folder.rglob("*") if file.is_file())
    return (folder / name.removeprefix(f"{folder.path}/") for name in folder.fs.find(folder.path))


def text_lines(file: Path) -> Iterator[str]:
    """Lines of UTF-8 text with their ends (\\n, \\r\\n or \\r, and no other character), without a
    byte-order mark.

    Raises ``ValueError`` for text of another encoding.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            yield from stream
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} must be UTF-8 text, got byte {error.object[error.start]:#x}; convert it"
        ) from None


def numbered_lines(file: Path) -> Iterator[tuple[str, str]]:
    """The lines of ``text_lines`` that are not blank, each after its place (for messages)."""
    name = str(file)
    for number, line in enumerate(text_lines(file), 1):
        if line.strip():
            yield f"{name} line {number}", line


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Values of non-blank lines, each after its place; ``ValueError`` names a bad line."""
    return ((where, json_value(where, line)) for where, line in numbered_lines(file))


def json_value(where: str, line: str) -> Any:
    """The value of a ``line``; raises ``ValueError`` that begins with ``where``."""
    text = line.strip(" \t\r\n")
    try:
        value, end = JSON.raw_decode(text)  # in a third of the time of loads
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except (ValueError, RecursionError) as error:
        got = f"{text[:40]!r} ({sentence_of(error)})"
        raise ValueError(f"{where} must be JSON, got {got}; repair it") from None
    return value


def writable(folder: Path, option: str = "--out") -> Path:
    """``folder``, created; raises ``ValueError`` naming ``option`` if it cannot be written."""
    if isinstance(folder, Path) and ADDRESS.match(str(folder)):
        raise ValueError(
            f"{option} must be a folder of this machine, got the address {folder}; write to a "
            "folder and copy it there, or mount it"
        )
    probe = folder / f".specmm-{os.getpid()}"
    try:
        make_folder(folder)
        probe.write_bytes(b"")
        probe.unlink()
    except Exception as error:  # the libraries of object storage have their own
        reason = (isinstance(error, OSError) and error.strerror) or sentence_of(error)
        raise ValueError(
            f"cannot write to {folder} ({reason}), choose another folder with {option}"
        ) from error
    return folder


def sync_folder(folder: Path) -> None:
    """Wait until the entries of ``folder`` (new names, renames) are on disk, where supported."""
    if not isinstance(folder, Path):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in LACKING:
            raise
    finally:
        os.close(handle)


def sentence_of(error: Exception) -> str:
    """``error`` as one line for users: a user's mistake by its message, others with their type."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif not isinstance(error, ValueError | OSError):
        text = f"{type(error).__name__}: {text}"
    return " ".join(text.split())


def slug(text: str) -> str:
    """``text`` as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:48] or "picture"
