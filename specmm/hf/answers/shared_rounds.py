"""What calls of a pipeline share where their rounds are programs or graphs: a target with its
memory, a drafter, and what plays the rounds.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specmm.core.decode import Play, Progress
from specmm.hf.drafters.drafting import Assembly
from specmm.hf.models.target import VLMTarget
from specmm.loading.hardware import is_nearly_full
from specmm.programs.graphs import GraphRound

MOST = 4  # methods or options in turn whose graphs are kept
SPARE = 0.25  # of a GPU's memory, without which only a run's own are


@dataclass
class SharedRounds:
    """A method's ``target`` and ``parts`` (None: plain decoding), and what plays its rounds."""

    target: VLMTarget
    parts: Assembly | None
    play: Play
    user: weakref.ref[Generator[Progress, None, None]] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is a run that may go on: it owns the memory."""
        steps = None if self.user is None else self.user()
        return steps is not None and inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED

    @property
    def failed(self) -> bool:
        """Whether graphs were wanted and could not be recorded."""
        return isinstance(self.play, GraphRound) and self.play.failed

    def alone(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """``steps`` of a run; busy until they have ended or nobody holds them any more."""

        def each() -> Generator[Progress, None, None]:
            yield from steps

        rest = each()
        self.user = weakref.ref(rest)
        return rest


class KeptRounds:
    """The rounds of the last calls by ``key`` (method, options, what the networks are), each with
    memory of its own: at ``most`` so many.
    """

    def __init__(self) -> None:
        self.found: dict[object, SharedRounds] = {}  # the newest last
        self.most = MOST

    @property
    def newest(self) -> SharedRounds:
        """Those of the last call."""
        return next(reversed(self.found.values()))

    def take(self, key: object, model: Any) -> SharedRounds | None:
        """Those of ``key``, if free for another run; what is not of ``model`` is dropped."""
        self.found = {k: one for k, one in self.found.items() if one.target.model is model}
        shared = self.found.pop(key, None)
        if shared is None or shared.busy or shared.failed:
            return None
        self.found[key] = shared
        return shared

    def make_room(self, device: torch.device, taken: bool, more: bool) -> None:
        """Before a run, whose rounds were ``taken`` or are not here: the oldest go beyond ``most``,
        if one ``more`` is to be kept, and all others where ``device`` is nearly full.
        """
        kept = self.most - more
        while len(self.found) > kept or (len(self.found) > taken and is_nearly_full(device, SPARE)):
            del self.found[next(iter(self.found))]

    def keep(self, key: object, shared: SharedRounds) -> None:
        """Keep ``shared`` for later calls."""
        self.found[key] = shared
