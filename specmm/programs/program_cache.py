"""The folder in which compiled programs are stored for later processes.

It is ``$SPECMM_PROGRAMS``, or ``specmm/programs`` in the user's cache; within it each version of
PyTorch, kind of processor and number of threads has a folder of its own. PyTorch finds programs
there by their operators, shapes and options, so it never runs a stale one. A user's
``TORCHINDUCTOR_CACHE_DIR`` is respected. A folder that cannot be used never ends a run: an empty
one replaces it in this process, with one warning.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

from specmm.loading.files import writable

ROOM = 256 * 2**20  # bytes that must be free: a program of ours takes some 20 MB
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
said: list[str] = []  # why programs of this process are not kept


def root() -> Path:
    """The folder for all machines' programs; raises ``RuntimeError`` if the user has no home."""
    chosen = os.environ.get("SPECMM_PROGRAMS")
    if chosen:
        return Path(chosen).expanduser()
    cached = os.environ.get("XDG_CACHE_HOME")
    return (Path(cached) if cached else Path.home() / ".cache") / "specmm" / "programs"


@cache
def machine() -> str:
    """A name for the facts on which programs depend: PyTorch, the processor and its flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    about = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    facts = [platform.machine(), platform.processor(), *sorted(set(about))]
    if torch.cuda.is_available():
        facts.append(torch.cuda.get_device_name())
    return f"torch{torch.__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def folder() -> Path | None:
    """This machine's folder, created; None (and one warning) if it cannot be written."""
    try:
        path = root() / f"{machine()}-{torch.get_num_threads()}"
        writable(path, "SPECMM_PROGRAMS")
        free = shutil.disk_usage(path).free
    except (ValueError, OSError, RuntimeError) as error:
        warn(str(error))
        return None
    if free < ROOM:
        warn(f"{path} has {free >> 20} MB left and needs {ROOM >> 20}")
        return None
    return path


def use() -> None:
    """Let PyTorch store programs in :func:`folder` from now on, if it can be used."""
    if used() is None and (path := folder()) is not None:
        os.environ[VARIABLE] = str(path)


def used() -> Path | None:
    """The folder in which this process's programs are stored; None if they are not."""
    # imported here, since it takes a moment
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    chosen = os.environ.get(VARIABLE)
    # PyTorch sets the variable to its default
    return Path(chosen) if chosen and chosen != default_cache_dir() else None


def leave(error: BaseException) -> None:
    """After an ``error`` in reading or writing a program: let PyTorch continue in a new folder of
    this process, if possible, which is removed at its end.
    """
    # imported here, since it takes a moment
    from torch._inductor.utils import clear_caches

    warn(first_line(error))
    clear_caches()  # programs read from the old folder
    try:
        temporary = tempfile.mkdtemp(prefix="specmm-programs-")
    except OSError:  # no room there, either: what fails again runs uncompiled
        return
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    os.environ[VARIABLE] = temporary


def first_line(error: BaseException) -> str:
    """The type and first line of ``error``, or of the error inside one from PyTorch's compiler."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {str(inner).strip()}".partition("\n")[0].rstrip(": ")


def warn(why: str) -> None:
    """Warn, once a process, that programs are not stored, and ``why``."""
    if not said:
        said.append(why)
        warnings.warn(
            f"compiled programs are not kept for later runs ({why}); give a folder that can be "
            "written with SPECMM_PROGRAMS, or empty the one there is",
            stacklevel=3,
        )
