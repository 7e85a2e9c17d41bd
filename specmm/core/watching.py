"""Events of a run for displays: its rounds and measurements.

A run sends events to its watcher and goes on. Without a watcher nothing is recorded or computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

Watcher: TypeAlias = Callable[[object], object]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within the block, call ``watcher`` with the events of this thread's runs."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def is_watched() -> bool:
    """Whether this thread has a watcher."""
    return _watcher.get() is not None


def tell(event: object) -> None:
    """Send ``event`` to the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(event)
