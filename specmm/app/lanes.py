"""The lanes of a race: a picture being drawn, and an answer being written.

Shape letters: B pictures of a batch (one), T tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specmm.app.clock import Racer, Stopwatch
from specmm.app.trace import Node, nodes_of
from specmm.core.decode import DecodedRound, Progress
from specmm.core.turns import turns_of
from specmm.core.watching import watched
from specmm.hf.answers.run import Run
from specmm.image_ar.continuous.masked_decode import HeadCalls
from specmm.image_ar.scales.collaborative import Turn

MOST_ROUNDS = 64  # the rounds whose trees the trace shows
WARM_UP = 3  # rounds


_workers: WeakKeyDictionary[Any, queue.SimpleQueue[Callable[[], None]]] = WeakKeyDictionary()


class Stopped(Exception):
    """Raised to end a lane's run if the user has left or its rest is not needed."""


@dataclass
class LaneWatch:
    """Events of a run, recorded while its ``clock`` is stopped: the trees of its ``rounds``, MAR's
    head ``calls`` by iteration, and the models' ``turns`` at VAR's scales.
    """

    clock: Stopwatch = field(default_factory=Stopwatch)
    rounds: list[list[Node]] = field(default_factory=list)
    calls: list[HeadCalls] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __call__(self, event: object) -> None:
        with self.clock.paused():
            match event:
                case DecodedRound() if len(self.rounds) < MOST_ROUNDS:
                    self.rounds.append(nodes_of(event))
                case HeadCalls():
                    self.calls.append(event)
                case Turn():
                    self.turns.append(event)


def _worker(pipe: Any) -> queue.SimpleQueue[Callable[[], None]]:
    """The work queue of the thread that runs ``pipe``. The thread is reused: a new one for each
    race would lack the state that PyTorch caches per thread.
    """
    if pipe not in _workers:
        _workers[pipe] = queue.SimpleQueue()
        threading.Thread(target=_work, args=[_workers[pipe]], daemon=True).start()
    return _workers[pipe]


def _work(tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()


class PictureLane:
    """``pipe`` drawing one picture by ``method`` in a thread, which runs only within ``advance``.

    ``counts`` are the tokens after each round, ``state`` is the last round's report.
    """

    def __init__(self, pipe: Any, method: Any, call: dict[str, Any]) -> None:
        self.pipe = pipe
        self.method = method
        self.watch = LaneWatch()
        self.clock = self.watch.clock
        self.out: Any = None
        self.counts: list[int] = []
        self.state: dict[str, Any] = {}
        self._call = call
        self._error: BaseException | None = None
        self._until = 0.0
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._left = False
        self._ended = threading.Event()
        _worker(pipe).put(self._draw)

    def advance(self, seconds: float) -> None:
        self._until = self.clock.seconds + seconds
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._left = True
        self._go.release()
        self._ended.wait()

    def _draw(self) -> None:
        """Run the pipeline in the lane's thread, whenever ``advance`` lets it."""
        self._go.acquire()
        try:
            with self.clock.running(), watched(self.watch):
                if not self._left:
                    call = dict(self._call, method=self.method, callback_on_step_end=self._step)
                    self.out = self.pipe(**call)
        except Exception as error:
            self._error = error
        self._ended.set()
        self._paused.release()

    def _step(self, pipe: Any, step: int, count: int, state: dict[str, Any]) -> dict[str, Any]:
        """The callback after a round: hand control back once the turn's time is over."""
        with self.clock.paused():
            self.counts.append(count)
            self.state = state
            if self.clock.seconds >= self._until:
                self._paused.release()
                self._go.acquire()
            if self._left:
                raise Stopped
        return state


@dataclass
class AnswerOutput:
    """A finished answer: ``stats`` and ``certificate`` as a pipeline's output has them."""

    stats: Any
    certificate: Any
    method: str


class TextLane:
    """An answer by ``method``: ``begin`` prepares the run on ``pipe``, outside the clock.

    ``pieces`` are the texts so far, each with whether it comes from accepted drafts.
    """

    def __init__(self, pipe: Any, method: Any, begin: Callable[[], Run]) -> None:
        self.pipe = pipe
        self.method = method
        self.watch = LaneWatch()
        self.clock = self.watch.clock
        self.out: Any = None
        self.pieces: list[tuple[str, bool]] = []
        self.counts: list[int] = []
        self._run = begin()
        self._end: Progress | None = None
        self._rounds = replace(self._run, steps=self._clocked(self._run.steps)).rounds()

    def advance(self, seconds: float) -> None:
        until = self.clock.seconds + seconds
        self._round()
        while self.out is None and self.clock.seconds < until:
            self._round()

    def _round(self) -> None:
        """Run one round, or store the finished answer."""
        pieces = next(self._rounds, None)
        if pieces is None:
            assert self._end is not None
            claim = self._run.certificate(self._end)
            self.out = AnswerOutput(self._end.stats, claim, self._run.method)
            return
        self.pieces += pieces[0].pieces
        self.counts.append(sum(self.counts[-1:]) + pieces[0].tokens)

    def close(self) -> None:
        self._rounds = iter(())  # drops the last reference to the run, which ends it

    def _clocked(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """``steps``, each in a separate turn; the clock runs only during them."""
        while True:
            with turns_of(self.pipe.model).take(), watched(self.watch), self.clock.running():
                progress = next(steps, None)
            if progress is None:
                return
            self._end = progress
            yield progress


def warm_up(lane: Racer) -> None:
    """Run a few untimed rounds, in which models are loaded, planned and allocated."""
    try:
        while lane.out is None and len(lane.counts) < WARM_UP:
            lane.advance(0.0)
    finally:
        lane.close()


def generator(pipe: Any, seed: int) -> torch.Generator:
    """The generator of ``seed`` for a run of ``pipe``."""
    return torch.Generator(pipe.device).manual_seed(seed)
