"""Saves time at the start and end of a command that opens one model, where it spends most of it.

Imported modules stay in memory. Python's garbage collector scans them repeatedly, which takes a
fifth of the time, so until the model is open it only scans new objects. At exit Python would
destroy the imported modules object by object, for another second and 130 MB that torch's libraries
read to do so.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

USUAL = gc.get_threshold()
NEW_ALONE = (5_000, 20, 1_000)


def starting() -> None:
    """Call this before the imports, and :func:`started` after them."""
    gc.set_threshold(*NEW_ALONE)


def started() -> None:
    """Restore the garbage collector's usual thresholds."""
    gc.set_threshold(*USUAL)


@contextmanager
def quick_end() -> Iterator[None]:
    """Around a whole command: after ``sys.exit`` and the exit handlers, end the process without
    destroying its objects.
    """
    ended: list[int] = []

    def leave() -> None:
        if ended:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
                stream.flush()
            os._exit(ended[0])

    atexit.register(leave)  # handlers run in reverse order of their registration
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            ended.append(end.code)
        raise
