"""The first and the last seconds of a command that opens one model: they are nearly all it takes.

What is imported stays. Python's garbage collector looks through all of it again and again, a fifth
of the time; until the model is open it looks at what is new alone. As the process ends Python would
take down every module, for half a second and with memory it never had; the system needs no time.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

USUAL = gc.get_threshold()
NEW_ALONE = (5_000, 20, 1_000)


class Process:
    """How the process of a command is to end: its exit ``status``, and whether ``at_once``."""

    status: int = 1
    at_once: bool = False

    def watch(self) -> None:
        """Call this first of all: what is registered first is called last as a process ends."""
        atexit.register(self._end)

    def _end(self) -> None:
        if self.at_once:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


PROCESS = Process()


def starting() -> None:
    """Call this before the imports, and :func:`started` after them."""
    gc.set_threshold(*NEW_ALONE)
    PROCESS.at_once = True


def started() -> None:
    """From now on garbage is looked for as usual."""
    gc.set_threshold(*USUAL)
