"""Locks on a job's output folder: the system's where the file system has them, else leases.

A lease is a small file (or object) that only one process can create. Its owner rewrites it every
``RENEWED`` seconds and removes it at the end. A lease that stays the same for ``ENDS`` seconds
belongs to a dead process. Waiting processes measure that by their own clocks, since machines'
clocks may differ.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specmm.loading.files import LACKING, reached, sentence_of, write_whole

log = logging.getLogger(__name__)
RENEWED = 5.0
ENDS = 30.0
LOOKS = 0.25  # seconds between two looks at leases
SETTLES = 2.0  # seconds in which another process that found the same lease ended has taken it, too
ALONE, SHARED, NOW = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB


@contextmanager
def held(file: Path, mode: int, rivals: str = "") -> Iterator[None]:
    """Context with a lock on ``file``, of a ``mode`` of flock's.

    A lease in its place waits for the leases beside it whose names match ``rivals`` (none: its
    own). Raises ``ValueError`` with ``NOW`` where another process holds it.
    """
    if isinstance(file, Path):
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, mode)  # until the process ends, in whatever way
            yield
            return
        except BlockingIOError:
            raise _occupied(file, "another process") from None
        except OSError as error:
            if error.errno not in LACKING:
                raise
        finally:
            os.close(handle)
    name = f"shared-{uuid.uuid4().hex}" if mode & SHARED else file.name
    lease = file.with_name(f"{name}.lease")
    head = _take(lease, rivals or lease.name, wait=not mode & NOW)
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(lease, head, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _release(lease, head)


def _occupied(journals: Path, who: str, more: str = "") -> ValueError:
    return ValueError(
        f"{journals.parent} is being written by {who}, wait for it or choose another --out{more}"
    )


# ---- leases


def _take(own: Path, rivals: str, wait: bool) -> bytes:
    """Create the lease ``own`` once no other one matches ``rivals``; returns how it begins."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    who = f"process {os.getpid()} on {socket.gethostname()} since {since}"
    head = f"{who}\n{uuid.uuid4().hex}\n".encode()
    while True:
        ended = _outlast(own.parent, rivals, wait)
        try:
            _create(own, head)
        except FileExistsError:
            continue
        if ended:
            time.sleep(SETTLES)
        if _read(own) == head and all(other == own for other in own.parent.glob(rivals)):
            return head
        _release(own, head)  # another one came at the same moment
        time.sleep(random.random() * LOOKS)


def _outlast(folder: Path, rivals: str, wait: bool) -> bool:
    """Wait until no lease in ``folder`` matches ``rivals``; one that has ended is removed, and the
    answer True.

    Raises ``ValueError`` when a lease is renewed, unless ``wait`` is set.
    """
    seen: dict[str, tuple[bytes, float]] = {}
    ended = False
    while leases := {
        lease: text for lease in folder.glob(rivals) if (text := _read(lease)) is not None
    }:
        for lease, text in leases.items():
            now = time.monotonic()
            if text and lease.name not in seen and not wait:
                said = "%s has a lease of %s: waiting until it is renewed or ends, %.0f s at most"
                log.warning(said, folder.parent, _owner(text), ENDS)
            before, since = seen.setdefault(lease.name, (text, now))
            if text != before:
                if before and not wait:
                    more = f"; a killed one's lease ends after {ENDS:.0f} s"
                    raise _occupied(folder, f"another process ({_owner(text)})", more)
                seen[lease.name] = text, now
            elif now - since > ENDS:
                lease.unlink(missing_ok=True)
                ended = True
        time.sleep(LOOKS)
    return ended


def _renew(own: Path, head: bytes, ended: threading.Event) -> None:
    """Rewrite the lease ``own`` until its work has ``ended``, or another process has taken it."""
    count = 0
    while not ended.wait(RENEWED):
        try:
            with reached(own):
                found = _read(own)
                if found is not None and not found.startswith(head):
                    log.warning("%s was taken by %s: results are made twice", own, _owner(found))
                    return
                count += 1
                write_whole(own, head + b"%d\n" % count)
        except OSError as error:  # a network that is away for a moment
            log.warning("a lease could not be renewed: %s", sentence_of(error))


def _create(lease: Path, text: bytes) -> None:
    """Create the file; raises ``FileExistsError`` where it is there."""
    if isinstance(lease, Path):
        with lease.open("xb") as stream:
            stream.write(text)
    else:
        lease.fs.pipe_file(lease.path, text, mode="create")


def _release(own: Path, head: bytes) -> None:
    """Remove the lease ``own``, unless another process has taken it."""
    with suppress(OSError), reached(own):
        if (_read(own) or b"").startswith(head):
            own.unlink()


def _read(lease: Path) -> bytes | None:
    try:
        return lease.read_bytes()
    except FileNotFoundError:
        return None


def _owner(text: bytes) -> str:
    return text.decode(errors="replace").partition("\n")[0] or "a process that begins"
