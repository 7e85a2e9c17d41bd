"""What a run did and how long each part took.

Times are host seconds; on a GPU they are honest only when the device is waited for, which
``Clock(sync=True)`` does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

TIMES = ("seconds", "draft_seconds", "verify_seconds", "search_seconds")


class Clock:
    """Adds up seconds by name: ``with clock("verify"): …``."""

    def __init__(self, sync: bool = False) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.sync = sync

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block and add it to ``name``."""
        if torch.compiler.is_compiling():  # what is in one program cannot be told apart
            yield
            return
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self.sync:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class Stats:
    """Counts of one run over a batch.

    ``tokens`` and ``rounds`` are summed over samples (a round counts for a sample only while it is
    unfinished); ``seconds`` is the wall clock of the whole run, ``draft_seconds`` and
    ``verify_seconds`` the model forwards in it, ``search_seconds`` what of the drafting was a
    search for paths.
    """

    tokens: int = 0
    rounds: int = 0
    batch_rounds: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    search_seconds: float = 0.0
    kept: list[int] = field(
        default_factory=list
    )  # kept[i]: sample rounds that committed i + 1 tokens
    depths: list[int] = field(default_factory=list)  # by batch round, drafts of the longest row

    @property
    def tau(self) -> float:
        """Block efficiency: tokens committed per round."""
        return self.tokens / max(self.rounds, 1)

    @property
    def accepted_by_position(self) -> list[float]:
        """By position of a draft, the share of sample rounds that accepted it and all before it."""
        behind = [sum(self.kept[i:]) for i in range(1, len(self.kept))]
        return [count / max(sum(self.kept), 1) for count in behind]

    @property
    def host_overhead(self) -> float:
        """Share of the time outside model forwards."""
        return (
            1 - (self.draft_seconds + self.verify_seconds) / self.seconds if self.seconds else 0.0
        )

    def as_dict(self) -> dict[str, Any]:
        """What a report says, for JSON."""
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "tau": self.tau,
            "host_overhead": self.host_overhead,
        }

    def add(self, other: Stats) -> None:
        """Add another run's counts."""
        for name in ("tokens", "rounds", "batch_rounds", *TIMES):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        width = max(len(self.kept), len(other.kept))
        pad = [list(k) + [0] * (width - len(k)) for k in (self.kept, other.kept)]
        self.kept = [a + b for a, b in zip(*pad, strict=True)]
        self.depths = self.depths + other.depths


def total(parts: Sequence[Stats]) -> Stats:
    """The counts of all ``parts`` (one at least) together, of their kind: a family may count more
    than others.
    """
    found = type(parts[0])()
    for part in parts:
        found.add(part)
    return found
