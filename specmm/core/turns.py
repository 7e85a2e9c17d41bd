"""Turns: threads that share a model run one after the other, in the order of their arrival.

Some state that a run changes belongs to the model: hooks on its layers, a processor's settings,
drafters with a cache, compiled programs. So each model has its turns: pipelines and
``custom_generate`` of one model wait for each other, but not for other models. Within a turn,
matrix products use the number of threads that is fastest for the model
(:mod:`specmm.choose.threads`), and the model is in evaluation mode.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn

from specmm.choose.threads import chosen
from specmm.core.derived import one_call

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """A first-come-first-served, reentrant lock of ``model``."""

    def __init__(self, model: object = None) -> None:
        self._model = (lambda: None) if model is None else ref(model)  # the model holds its turns
        self._guard = threading.Lock()  # for the fields below; never held during a turn
        self._thread: int | None = None  # the thread that has the turn
        self._depth = 0  # how often that thread has taken it
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    @property
    def waiting(self) -> int:
        """The number of waiting threads."""
        return len(self._waiting)

    @contextmanager
    def take(self, call: object = None) -> Iterator[None]:
        """Wait for the turn, hold it during the block, and pass it on even if the block raises.

        The model is checked once for all turns of the same ``call``.
        """
        self._wait()
        try:
            model = self._model()
            with chosen(model), one_call(call), _evaluating(model):
                yield
        finally:
            self._give()

    def each(self, items: Iterator[R]) -> Iterator[R]:
        """Yields ``items``, each computed in its own turn, so that other threads run in between."""
        call = object()
        while True:
            with self.take(call):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def _wait(self) -> None:
        """Take the turn, or wait in the queue for it; an interrupted wait leaves the queue."""
        me = threading.get_ident()
        called = threading.Event()
        with self._guard:
            if self._thread in (None, me):
                self._thread = me
                self._depth += 1
                return
            self._waiting.append((me, called))
        try:
            called.wait()
        except BaseException:
            # interrupted: leave the queue, or pass on the turn that has just come
            with self._guard:
                if not called.is_set():
                    self._waiting.remove((me, called))
                    raise
            self._give()
            raise

    def _give(self) -> None:
        """Release the turn once, and pass it to the next thread when all are released."""
        with self._guard:
            self._depth -= 1
            if self._depth:
                return
            self._thread = None
            if self._waiting:
                self._thread, called = self._waiting.popleft()
                self._depth = 1
                called.set()


@contextmanager
def _evaluating(model: object) -> Iterator[None]:
    """Put all of ``model`` into evaluation mode within the block; restore the modes after it."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


_turns: WeakKeyDictionary[object, Turns] = WeakKeyDictionary()
_guard = threading.Lock()


def turns_of(model: object) -> Turns:
    """The turns of ``model``: one object for the model's lifetime."""
    with _guard:
        return _turns.setdefault(model, Turns(model))


def in_its_turn(model: Callable[[Any], object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: run the function in a turn of ``model(first argument)``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with turns_of(model(args[0])).take():
                return function(*args, **kwargs)

        return run

    return decorate
