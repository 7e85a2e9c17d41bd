"""What calls of a pipeline share where their rounds are programs or graphs: a target with its
memory, a drafter, and what plays the rounds.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from specmm.captured import CapturedRound
from specmm.decode import Play, Progress
from specmm.hf.drafting import Assembly
from specmm.hf.target import VLMTarget


@dataclass
class SharedRounds:
    """A method's ``target`` and ``parts`` (None: plain decoding), and what plays its rounds."""

    target: VLMTarget
    parts: Assembly | None
    play: Play
    drafter: object  # what ``parts`` draft with
    user: weakref.ref[Generator[Progress, None, None]] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is a run that may go on: it owns the memory."""
        steps = None if self.user is None else self.user()
        return steps is not None and inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED

    @property
    def failed(self) -> bool:
        """Whether graphs were wanted and could not be recorded."""
        return isinstance(self.play, CapturedRound) and self.play.captured.failed

    def fits(self, model: Any, drafter: object) -> bool:
        """Whether it is of ``model`` and drafts with ``drafter``."""
        return self.target.model is model and self.drafter is drafter

    def alone(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """``steps`` of a run; busy until they have ended or nobody holds them any more."""

        def each() -> Generator[Progress, None, None]:
            yield from steps

        rest = each()
        self.user = weakref.ref(rest)
        return rest
