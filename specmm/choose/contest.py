"""Chooses the fastest method for a kind of call: candidates are tried on the call's own prompt, for
a share of the time of calls.

A trial decodes a few tokens by one candidate after the prompt and discards them. Calls are timed,
too, so that the chosen method continues to be measured. Trials may take ``START`` after the first
call, and then ``SHARE`` of the time of calls: a short first answer is decoded plainly, or by the
method that known acceptance forecasts to be fastest. Measurements are kept in one :class:`Record`
for each kind of call, and noted for later processes, whose first call then takes the fastest known
method.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from specmm import methods
from specmm.choose.notes import Notes
from specmm.core.decode import Progress
from specmm.core.stats import Stats
from specmm.core.watching import tell

LOGGER = logging.getLogger(__name__)
SHARE = 0.03  # the share of calls' time that trials may take
START = 24  # plain tokens' time for trials after the first call, or half a usual call's
AT_ONCE, GRANT = 0.25, 48  # for the first call, if a gain is forecast: a share of it, and tokens
FEW, ROUNDS = 8, 6  # tokens and rounds of a trial, beside the prompt's
PASSES = 3  # trials of each candidate that stays; one, where its tokens a round are known
TRUST = 64  # rounds that tokens a round which are known count as
LAST = 9  # samples that count, of all
BEHIND = 0.7  # of the fastest's speed: slower methods are out after two trials
HOPELESS = 0.5  # the same, at once
MARGIN = 1.05  # times as fast as plain decoding a method must be
SURE = 1.3  # times plain decoding's speed that must be forecast to be run untried
USUAL = 64  # tokens of a call, of which none has been made
RECENT = 7 * 86_400.0  # seconds for which notes hold: drafters and machines change
PROMPT = 4.0  # tokens that reading a prompt takes as long as, until that is measured
LEVEL, NODE = 0.1, 0.04  # guessed costs of a drafted level and a scored node, in plain steps


@dataclass(frozen=True)
class Candidate:
    """A ``method`` to try: its tokens a round ``tau`` if acceptance is known, its tree's number of
    ``nodes``, root included, and of ``levels``, which are drafted one after another.
    """

    method: Any
    tau: float = 0.0
    nodes: int = 0
    levels: int = 0


PLAIN = Candidate(methods.AR())
Begin: TypeAlias = Callable[[Any], Iterator[Progress]]
"""Begins a run of a call's length by a method."""


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock for runs on ``device``. On a CPU it counts this thread's processor seconds, without
    time that other processes take: the thread takes part in all products.
    """
    per_process = device.type == "cpu" and sys.platform == "linux"
    return time.thread_time if per_process else time.perf_counter


class Measured(NamedTuple):
    """Event for watchers during trials: ``done`` of at most ``total``."""

    done: int
    total: int


@dataclass
class Sample:
    """The seconds of a run's ``prompt`` with its first round, and of each of the ``rounds`` after
    it, which gave a row ``tokens`` tokens. ``tv`` is a relaxed rule's total variation a token;
    whole runs have ``stats``. A trial has ``beside``: the method of the call after it, and the
    trial's speed relative to that call, because answers differ.
    """

    prompt: float = 0.0
    rounds: list[float] = field(default_factory=list)
    tokens: float = 0.0
    tv: float = 0.0
    stats: Stats | None = None
    beside: tuple[Any, float] | None = None

    @property
    def each(self) -> float:
        """Seconds a token."""
        return self.round * len(self.rounds) / self.tokens

    @property
    def round(self) -> float:
        """Seconds of a round: the median without the first third of rounds, which take longer
        because memory and shapes are new.
        """
        return statistics.median(self.rounds[len(self.rounds) // 3 :])


class _Notes(NamedTuple):
    """The content of notes: their time, calls and the times of these, samples by method."""

    at: float
    sums: tuple[int, float, float, float]
    samples: dict[str, list[Sample]]
    complete: bool


def _parsed(notes: Any) -> _Notes:
    """Notes read from their file's value."""
    calls, *times = notes["sums"]
    decoded, lasted, spent = map(float, times)
    samples = {
        method: [
            Sample(float(prompt), [float(seconds)] * int(rounds), float(tokens), float(tv))
            for prompt, seconds, rounds, tokens, tv in rows
        ]
        for method, rows in notes["samples"].items()
    }
    if not all(x.tokens > 0 and x.rounds for rows in samples.values() for x in rows):
        raise ValueError("a sample of nothing")
    sums = int(calls), decoded, lasted, spent
    return _Notes(float(notes["at"]), sums, samples, notes["complete"] is True)


@dataclass
class Record:
    """The measurements of one kind of call with ``rows`` rows: ``samples`` of plain decoding and of
    the ``candidates`` by method, the newest last.

    ``decoded`` counts a row's tokens in calls; ``lasted`` and ``spent`` are the times of calls and
    of trials, in tokens of plain decoding. Relaxed methods above a total variation of ``tv`` a
    token are excluded.
    """

    candidates: Sequence[Candidate] = ()
    rows: int = 1
    tv: float = 0.0
    samples: dict[Any, list[Sample]] = field(default_factory=dict)
    decoded: float = 0.0
    lasted: float = 0.0
    spent: float = 0.0
    pending: list[Sample] = field(default_factory=list)  # trials before the call that is to come
    failed: dict[Any, str] = field(default_factory=dict)  # why, of those whose trials did
    calls: int = 0
    now: Callable[[], float] = time.perf_counter  # see ``clock_of``
    notes: Notes = field(default_factory=Notes)
    noted: dict[str, list[Sample]] = field(default_factory=dict)  # of earlier processes, by method
    changed: bool = False  # since it was noted
    looked: bool = False  # for all candidates there are, by a family that may look for some
    complete: bool = False  # all of them were tried as often as is needed

    def remember(self, notes: Notes, fresh: bool = False) -> Self:
        """Continue from earlier processes' notes, unless ``fresh``, and note later measurements."""
        self.notes = notes
        earlier = None if fresh else notes.read(_parsed)
        if earlier is not None and time.time() - earlier.at < RECENT:
            self.calls, self.decoded, self.lasted, self.spent = earlier.sums
            self.noted, self.complete = earlier.samples, earlier.complete
        return self

    def known(self) -> str:
        """The method that earlier processes found fastest, as text; "" without notes."""
        medians = {
            method: statistics.median(x.round for x in samples)
            * sum(len(x.rounds) for x in samples)
            / sum(x.tokens for x in samples)
            for method, samples in self.noted.items()
        }
        return min(medians, key=medians.__getitem__, default="")

    def _recall(self) -> None:
        """Take over the noted samples of the candidates."""
        for candidate in self.order if self.noted else ():
            if samples := self.noted.pop(methods.label(candidate.method), None):
                self.samples.setdefault(candidate.method, samples)

    def _note(self) -> None:
        """Write the notes for later processes."""
        # methods not asked for in this process stay noted
        measured = self.noted | {methods.label(one): all_of for one, all_of in self.samples.items()}
        rows = {
            method: [(x.prompt, x.round, len(x.rounds), x.tokens, x.tv) for x in samples]
            for method, samples in measured.items()
        }
        sums = self.calls, self.decoded, self.lasted, self.spent
        self.notes.write(
            {"at": time.time(), "sums": sums, "samples": rows, "complete": self.complete}
        )
        self.changed = False

    def played(
        self, method: Any, steps: Iterator[Progress], few: float, least: float = 0.0
    ) -> Iterator[Progress]:
        """Yield the ``steps`` of a run by ``method`` and take a sample at its end.

        With a finite ``few`` it is a trial, which ends once rows have ``few`` tokens on average
        after at least ``ROUNDS`` rounds, or after so long that ``few`` would be fewer than
        ``least`` tokens a second. A whole run tells earlier trials how fast they were beside it.
        """
        sample = Sample()
        trial = math.isfinite(few)
        begin = self.now()
        for progress in steps:
            counts = float(progress.counts.float().mean()) if trial or not sample.prompt else 0.0
            seconds = self.now() - begin  # after the counts were read, for which a GPU was waited
            if not sample.prompt:
                sample.prompt, first = seconds, counts
            else:
                sample.rounds.append(seconds)
            yield progress
            begin = self.now()
            long_enough = counts - first >= few and len(sample.rounds) >= ROUNDS
            if trial and (long_enough or sum(sample.rounds) * least > few):
                break
        sample.tokens = float(progress.counts.float().mean()) - first
        if progress.stats.tokens:  # the last progress only adds them
            sample.stats = progress.stats
            sample.rounds.pop()
        if sample.tokens > 0 and sample.rounds:
            sample.tv = float(progress.excess) / max(float(progress.measured), 1.0)
            self.samples[method] = [*self.samples.get(method, []), sample][-LAST:]
            if trial:
                self.pending.append(sample)
            else:
                for other in self.pending:
                    other.beside = method, sample.each / other.each
                self.pending = []

    def called(self, method: Any, steps: Iterator[Progress]) -> Iterator[Progress]:
        """As :meth:`played`, for a call, whose time adds to the budget of trials."""
        for progress in self.played(method, steps, math.inf):
            yield progress
        tokens = float(progress.counts.float().mean())
        measured = method in self.samples and PLAIN.method in self.samples
        self.decoded += tokens
        self.lasted += tokens / self.gain(method) if measured else tokens
        self.calls += 1
        if self.changed or not self.calls & (self.calls - 1):  # a power of two
            self._note()

    def worthwhile(self, coming: float, share: float = SHARE) -> bool:
        """Whether to consider drafters, which may have to be read from files: not for a short first
        call, nor if calls usually end before drafts would pay.
        """
        long = self.usual >= PROMPT + FEW and bool(self.calls or self.noted)
        return long or share * coming >= PROMPT + FEW

    @property
    def usual(self) -> float:
        """The usual number of a row's tokens in a call."""
        return self.decoded / self.calls if self.calls else USUAL

    @property
    def order(self) -> list[Candidate]:
        """All candidates, in the order of their trials."""
        return [PLAIN, *sorted(self.candidates, key=lambda candidate: -self.forecast(candidate))]

    def choose(
        self,
        begin: Begin,
        coming: float,
        few: int = FEW,
        share: float = SHARE,
        passes: int = PASSES,
    ) -> Any:
        """Run the trials that the budget allows, of ``few`` tokens each, and return the method
        expected to be fastest for a call of ``coming`` tokens.
        """
        self._recall()
        order = self.order
        may = share * (self.lasted + coming) + (min(START, self.usual / 2) if self.calls else 0)
        if not self.calls and len(order) > 1 and self.forecast(order[1]) >= SURE:
            may += min(AT_ONCE * coming, GRANT)
        needed = [1 if one.tau else passes for one in order]
        while (candidate := self._next(order, needed)) is not None:
            if self.spent + self._cost(candidate, order, few) > may:
                break
            if not self._tried(candidate.method, begin, few, whole=math.isinf(share)):
                break  # the call is too short
            tried = sum(map(len, self.samples.values()))
            tell(Measured(tried, max(tried, sum(needed))))
        else:
            self.complete = self.complete or (self.looked and bool(self.samples))
        if self.changed and math.isinf(share):
            self._note()
        return self.fastest()

    def _next(self, order: Sequence[Candidate], needed: Sequence[int]) -> Candidate | None:
        """The candidate still in the contest that has the fewest trials, if these are too few."""
        left = self.left
        staying = [(one, n) for one, n in zip(order, needed, strict=True) if one.method not in left]
        counts = [(len(self.samples.get(one.method, ())), one, most) for one, most in staying]
        lacking = [(count, one) for count, one, most in counts if count < most]
        if len(staying) < 2 or not lacking:
            return None
        return min(lacking, key=lambda each: each[0])[1]

    def _cost(self, candidate: Candidate, order: Sequence[Candidate], few: int) -> float:
        """The expected cost of a trial of ``candidate``, in tokens of plain decoding. A trial of
        plain decoding includes the trial of another method, without which it is useless.
        """
        plain = self.samples.get(PLAIN.method)
        if not plain:
            others = [other for other in order if other is not PLAIN]
            best = self.forecast(others[0]) if others else 1.0
            return (PROMPT + few) + (0.0 if self.samples else PROMPT + few / max(best, 1.0))
        prompt = statistics.median(sample.prompt for sample in plain) / self.each(PLAIN.method)
        return prompt + few / max(self.forecast(candidate), 1.0)

    def _tried(self, method: Any, begin: Begin, few: int, whole: bool) -> bool:
        """Try ``method`` (to the end if ``whole``); returns whether a sample was taken."""
        self.changed = True
        start = self.now()
        fastest = min((self.each(known) for known in self.samples), default=0.0)
        leaves = fastest and method != PLAIN.method and not whole
        least = HOPELESS / fastest if leaves else 0.0
        try:
            for _ in self.played(method, begin(method), few, least):
                pass
        except ValueError as error:  # a drafter's error; plain decoding's would end the call anyway
            if method == PLAIN.method:
                raise
            LOGGER.warning("auto: without %s: %s", methods.label(method), error)
            self.failed[method] = str(error)
        known = PLAIN.method in self.samples
        took = self.now() - start
        self.spent += took / self.each(PLAIN.method) if known else PROMPT + few
        return method in self.samples or method in self.failed

    @property
    def left(self) -> dict[Any, str]:
        """The methods that are out of the contest, with the reason."""
        if PLAIN.method not in self.samples:
            return self.failed
        losers = {one: why for one in self.samples if (why := self._leaves(one))}
        return losers | self.failed

    def _leaves(self, method: Any) -> str:
        """Why ``method`` is out of the contest; "" if it is not."""
        off = self.deviation(method)
        nearer = [self.gain(other) for other in self.samples if self.deviation(other) <= off]
        least = HOPELESS if len(self.samples[method]) < 2 else BEHIND
        if off > self.tv:
            return f"its total variation is above {self.tv:g}"
        if method != PLAIN.method and self.gain(method) < least * max(nearer):
            return "another is much faster and no further from the model"
        return ""

    def fastest(self) -> Any:
        """The method to run: the fastest by a sufficient margin, or the forecast one if plain
        decoding was not measured.
        """
        if PLAIN.method not in self.samples:
            best = [one for one in self.order[1:2] if one.method not in self.failed]
            return best[0].method if best and self.forecast(best[0]) >= SURE else PLAIN.method
        near = [one for one in self.samples if self.deviation(one) <= self.tv]
        staying = [one for one in near if one not in self.failed]
        # leaving the model's distribution must be worth it
        worth = {one: self.gain(one) / (MARGIN if self.deviation(one) else 1) for one in staying}
        fastest = max(worth, key=lambda one: worth[one])
        return fastest if worth[fastest] > MARGIN else PLAIN.method

    def reason(self) -> str:
        """The reason for :meth:`fastest`, as text."""
        chosen = self.fastest()
        if not self.candidates:
            if self.looked:
                return "there is no drafter"
            why = "calls are short, or plain decoding was the fastest in earlier processes"
            return why if self.calls else "the first call, and a short one"
        if PLAIN.method in self.samples:
            measured = [one for one in self.samples if one != PLAIN.method]
            gains = ", ".join(f"{methods.label(one)} {self.gain(one):.2f}x" for one in measured)
            return f"measured beside plain decoding: {gains or 'no other yet'}"
        if chosen == PLAIN.method:
            return "too short to try others, and none is forecast to gain for certain"
        best = self.order[1]
        return f"tau {best.tau:.2f} and {self.forecast(best):.2f}x plain decoding forecast"

    def forecast(self, candidate: Candidate) -> float:
        """A rough speed-up over plain decoding, by which trials are ordered; 1 if unknown."""
        adds = LEVEL * candidate.levels + NODE * candidate.nodes * self.rows
        return candidate.tau / (1 + adds) if candidate.tau else 1.0

    def each(self, method: Any) -> float:
        """Seconds a token of ``method``: median seconds of a round over tokens a round."""
        rounds = statistics.median(sample.round for sample in self.samples[method])
        return rounds / self.tau(method)

    def gain(self, method: Any) -> float:
        """Measured speed-up over plain decoding. A method with only trials is compared through the
        calls right after them.
        """
        samples = self.samples[method]
        partners = [sample.beside for sample in samples if sample.beside]
        has_tau = any(one.tau for one in self.candidates if one.method == method)
        if has_tau or len(partners) < len(samples) or any(other == method for other, _ in partners):
            return self.each(PLAIN.method) / self.each(method)
        plain = self.each(PLAIN.method)
        return statistics.median(plain / self.each(other) * ratio for other, ratio in partners)

    def tau(self, method: Any) -> float:
        """Tokens a round of ``method``; a value known beforehand counts as ``TRUST`` rounds."""
        before = max((one.tau for one in self.candidates if one.method == method), default=0.0)
        trust = TRUST if before else 0
        tokens = sum(sample.tokens for sample in self.samples[method])
        rounds = sum(len(sample.rounds) for sample in self.samples[method])
        return (trust * before + tokens) / (trust + rounds)

    def deviation(self, method: Any) -> float:
        """Mean total variation a token of a relaxed ``method``, 0 of exact ones."""
        return statistics.fmean(sample.tv for sample in self.samples[method])
