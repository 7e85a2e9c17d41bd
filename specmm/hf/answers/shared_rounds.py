"""Compiled rounds and CUDA graphs that the calls of a pipeline share, with the target and drafter
whose memory they use.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from specmm.core.decode import Play, Progress
from specmm.hf.drafters.drafting import Assembly
from specmm.hf.models.target import VLMTarget
from specmm.loading.hardware import is_nearly_full
from specmm.programs.graphs import GraphRound

Key: TypeAlias = tuple[Any, ...]
MOST = 4  # programs or graphs stored at most, by method and options
SPARE = 0.25  # the share of a GPU's memory below which only the present run's graphs are stored


@dataclass
class SharedRounds:
    """A method's ``target``, ``parts`` (None: plain decoding) and ``play``, which runs a round."""

    target: VLMTarget
    parts: Assembly | None
    play: Play
    user: weakref.ref[Generator[Progress, None, None]] | None = None  # the run that uses it

    @property
    def busy(self) -> bool:
        """Whether an unfinished run owns the memory."""
        steps = None if self.user is None else self.user()
        return steps is not None and inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED

    @property
    def failed(self) -> bool:
        """Whether recording graphs was tried and failed."""
        return isinstance(self.play, GraphRound) and self.play.failed

    def alone(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """Wrap the ``steps`` of a run: busy until they have ended or are garbage-collected."""

        def each() -> Generator[Progress, None, None]:
            yield from steps

        rounds = each()
        self.user = weakref.ref(rounds)
        return rounds


class KeptRounds:
    """Cache of the programs or CUDA graphs of at most ``most`` calls, each with its own memory.
    Keys hold the method, the options and the networks' versions, the model's last.
    """

    def __init__(self) -> None:
        self.found: dict[Key, SharedRounds] = {}  # the newest last
        self.most = MOST

    @property
    def newest(self) -> SharedRounds:
        """The rounds of the last call."""
        return next(reversed(self.found.values()))

    def busy(self, key: Key) -> bool:
        """Whether a run uses the rounds of ``key``."""
        return key in self.found and self.found[key].busy

    def take(self, key: Key) -> SharedRounds | None:
        """The rounds of ``key`` if no run uses them; drops rounds of other model versions."""
        self.found = {k: kept for k, kept in self.found.items() if k[-1] == key[-1]}
        shared = self.found.pop(key, None)
        if shared is None or shared.busy or shared.failed:
            return None
        self.found[key] = shared
        return shared

    def make_room(self, device: torch.device, taken: bool, more: bool) -> None:
        """Evict before a run: the oldest entries above ``most`` (counting a new one if ``more``),
        and on a nearly full ``device`` all but the newest, if the run has ``taken`` that one.
        """
        room = self.most - more
        while len(self.found) > room or (len(self.found) > taken and is_nearly_full(device, SPARE)):
            del self.found[next(iter(self.found))]

    def keep(self, key: Key, shared: SharedRounds) -> None:
        """Store ``shared`` for later calls."""
        self.found[key] = shared
