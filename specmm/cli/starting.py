"""The first seconds of a command that opens one model: they are nearly all it takes.

What is imported stays. Python's garbage collector looks through all of it again and again, a fifth
of the time; until the model is open it looks at what is new alone.
"""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
NEW_ALONE = (5_000, 20, 1_000)


def starting() -> None:
    """Call this before the imports, and :func:`started` after them."""
    gc.set_threshold(*NEW_ALONE)


def started() -> None:
    """From now on garbage is looked for as usual."""
    gc.set_threshold(*USUAL)
