"""A run's counts, the seconds of its parts, and its certificate.

Times are host seconds. On a GPU they are meaningful only if the host waits for the device, as
``Clock(sync=True)`` does.

Claims: ``exact``: the output has the target's distribution. ``bounded``: it differs, and ``tv`` is
a measured bound on the total variation per token; summed over a sample's tokens it bounds the
sample's. ``heuristic``: nothing is claimed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

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
        if torch.compiler.is_compiling():  # parts of one program cannot be timed
            yield
            return
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self.sync and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class Stats:
    """Counts of one run over a batch.

    ``tokens`` and ``rounds`` are summed over samples. A sample's first token also counts in
    ``prefilled`` if the prefill, not a round, gave it. A round counts for a sample only while the
    sample is unfinished. ``seconds`` is the wall clock of the whole run, ``draft_seconds`` and
    ``verify_seconds`` the model forwards in it, ``search_seconds`` the part of the drafting that
    was a search for paths.
    """

    tokens: int = 0
    rounds: int = 0
    batch_rounds: int = 0  # of the whole batch
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    search_seconds: float = 0.0
    # kept[i]: sample rounds that committed i + 1 tokens
    kept: list[int] = field(default_factory=list)
    # by batch round, drafts of the longest row
    depths: list[int] = field(default_factory=list)
    prefilled: int = 0
    kept_by_row: list[list[int]] = field(default_factory=list)  # ``kept`` of each sample

    @property
    def tau(self) -> float:
        """Block efficiency: tokens committed per round, without prefilled tokens."""
        return (self.tokens - self.prefilled) / max(self.rounds, 1)

    @property
    def taus(self) -> list[float]:
        """Block efficiency of each sample; 0 if it ended before the first round."""
        rows = self.kept_by_row
        return [sum((i + 1) * n for i, n in enumerate(row)) / max(sum(row), 1) for row in rows]

    @property
    def accepted_by_position(self) -> list[float]:
        """By position of a draft: the share of sample rounds that accepted all drafts up to it."""
        accepted = [sum(self.kept[i:]) for i in range(1, len(self.kept))]
        return [count / max(sum(self.kept), 1) for count in accepted]

    @property
    def host_overhead(self) -> float:
        """Share of the time outside model forwards."""
        if not self.seconds:
            return 0.0
        return 1 - (self.draft_seconds + self.verify_seconds) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """The numbers of a report, for JSON."""
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "tau": self.tau,
            "host_overhead": self.host_overhead,
        }

    def add(self, other: Stats) -> None:
        """Add another run's counts."""
        for name in ("tokens", "rounds", "batch_rounds", "prefilled", *TIMES):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        width = max(len(self.kept), len(other.kept))
        pad = [list(k) + [0] * (width - len(k)) for k in (self.kept, other.kept)]
        self.kept = [a + b for a, b in zip(*pad, strict=True)]
        self.depths = self.depths + other.depths
        self.kept_by_row = self.kept_by_row + other.kept_by_row


def total(parts: Sequence[Stats]) -> Stats:
    """The sum of all ``parts`` (at least one), in their class, which may have more fields."""
    summed = type(parts[0])()
    for part in parts:
        summed.add(part)
    return summed


@dataclass(frozen=True)
class Certificate:
    """A claim, its reason, and the total variation per token: 0 if exact, None if heuristic.

    ``settings`` define the distribution: the model's under these options (temperature, guidance,
    filters, iterations …).
    """

    kind: Literal["exact", "bounded", "heuristic"]
    reason: str
    tv: float | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.kind == "bounded") != (self.tv is not None and self.kind != "exact"):
            must = "must" if self.kind == "bounded" else "must not"
            raise ValueError(f"a {self.kind} certificate {must} hold a tv")

    def under(self, settings: Mapping[str, object]) -> Certificate:
        """The same claim about the model's distribution under ``settings``."""
        return replace(self, settings=dict(settings))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """One line for people."""
        text: str = self.kind
        if self.kind == "bounded":
            assert self.tv is not None, "it was measured"
            shown = math.ceil(round(self.tv * 1e4, 6)) / 1e4  # rounded up: the claim stays true
            text += f", total variation a token at most {shown:.4f} on average (measured)"
        text += f": {self.reason}"
        if self.settings:
            named = ", ".join(f"{name} {value}" for name, value in self.settings.items())
            text += f" (the model at {named})"
        return text


def rule_certificate(name: str, exact: bool, excess: float | None) -> Certificate:
    """The certificate of a run by a rule; ``excess`` is a relaxed rule's mean excess per token."""
    if exact:
        reason = f"every token kept or drawn by the {name} rule follows the target's distribution"
        return Certificate("exact", reason, 0.0)
    if excess is None:
        return Certificate("heuristic", f"the {name} rule is relaxed and no round was measured")
    measured = "measured in every round of this run"
    return Certificate("bounded", f"the {name} rule is relaxed; {measured}", excess)


def merged_certificate(parts: Sequence[tuple[Certificate, float]]) -> Certificate | None:
    """The weakest claim of several runs, with the weighted mean of ``tv``; None without any.

    ``parts`` are certificates and their weights.
    """
    if not parts:
        return None
    order = ("exact", "bounded", "heuristic")
    weakest = max((one for one, _ in parts), key=lambda one: order.index(one.kind))
    reasons = dict.fromkeys(one.reason for one, _ in parts if one.kind == weakest.kind)
    weakest = replace(weakest, reason="; ".join(reasons))
    if weakest.kind != "bounded":
        return weakest
    total = sum(weight for _, weight in parts)
    return replace(weakest, tv=sum((one.tv or 0.0) * weight for one, weight in parts) / total)


def speedup(baseline: Sequence[float], seconds: Sequence[float]) -> float:
    """Median of ``baseline`` over the median of ``seconds``."""
    return statistics.median(baseline) / statistics.median(seconds)


def quartiles(baseline: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile of the ratios of paired runs on the same inputs."""
    ratios = [b / s for b, s in zip(baseline, seconds, strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high
