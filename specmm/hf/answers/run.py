"""A running batch of prompts: its prompts, its rounds and its output.

Shape letters: B rows of a batch, T room for tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from specmm.choose.contest import Record
from specmm.core.continuous_batching import Queue
from specmm.core.decode import Play, Progress, one_round
from specmm.core.drafter import Drafter
from specmm.core.stats import Certificate, Stats
from specmm.extending.kinds import shown
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.hf.prompts.stop_strings import StopStrings
from specmm.programs.compiled import uncompiled_calls
from specmm.programs.graphs import GraphRound
from specmm.verify import Rule
from specmm.verify.claims import run_claim


@dataclass(kw_only=True)
class Answered:
    """Fields that all outputs share: ``tokens`` [B] of ids (an end token included), ``stats``,
    ``certificate``, ``method``, and ``compiled`` (whether programs or CUDA graphs ran the rounds).
    ``prompt_tokens`` [B] counts the prompt's tokens, those of pictures included; ``finish_reasons``
    [B] are "stop" or "length", and ``taus`` [B] are tokens a round.
    """

    tokens: list[Tensor]
    stats: Stats
    certificate: Certificate
    method: str
    compiled: bool = False
    prompt_tokens: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)


class Chosen(NamedTuple):
    """The ``method`` to run, its ``name``, and the record for its seconds, if any."""

    method: Any
    name: str
    record: Record | None = None

    def timed(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """The ``steps`` of the run, timed for the record."""
        return steps if self.record is None else self.record.called(self.method, steps)


@dataclass
class PromptBatch:
    """The ``count`` prompts of a call, ``batch_size`` at a time (0: all); ``of`` prepares some."""

    of: Callable[[slice], VLMPrompt]  # on the CPU: those that wait need no room elsewhere
    count: int
    batch_size: int = 0

    def first(self, target: VLMTarget) -> VLMPrompt:
        """The prompts that the rows begin with, with room for waiting prompts.

        Raises ``ValueError`` for prompts that ``target`` cannot hold.
        """
        rows = min(self.batch_size or self.count, self.count)
        if rows < self.count and target.family.turning_point is not None:
            raise ValueError(
                f"batch_size must be 0 for {target.name}, whose positions depend on a batch's "
                "longest text"
            )
        if rows < self.count and target.family.reads_pictures_apart:
            raise ValueError(
                f"batch_size must be 0 for {target.name}, whose layers attend to all pictures of a "
                "batch side by side"
            )
        prompt = self.of(slice(rows))
        self.waiting = {i: self.of(slice(i, i + 1)) for i in range(rows, self.count)}
        prompts = (prompt, *self.waiting.values())
        self.lengths = [length for row in prompts for length in row.lengths.tolist()]
        prompt.longest = max((p.width for p in self.waiting.values()), default=0)
        for row in prompts:
            target.check(row)
        return prompt.to(target.device, target.dtype)

    def queue(self, target: VLMTarget, generators: Sequence[torch.Generator]) -> Queue | None:
        """The queue of all prompts; None if all are answered at once."""

        def prompt(number: int) -> VLMPrompt:
            return self.waiting.pop(number).to(target.device, target.dtype)

        return Queue(prompt, generators, self.batch_size) if self.batch_size else None


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """Ends a ``streamer`` however the run ends: another thread may be waiting for it.

    Raises ``ValueError`` for an object that is not a streamer.
    """
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(
            "streamer must have put and end, as transformers' TextStreamer has, got "
            f"{shown(streamer)}; give options by name, as max_new_tokens=64"
        )
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def stream(streamer: BaseStreamer, new: list[Tensor]) -> None:
    """Put a round's ids into a transformers ``streamer``, which takes one answer, id by id."""
    if len(new) != 1:
        raise ValueError(
            f"a streamer takes one answer at a time, got {len(new)} questions; use stream() instead"
        )
    for token in new[0].cpu():
        streamer.put(token[None])


def last_of(steps: Iterator[Progress], streamer: BaseStreamer | None = None) -> Progress:
    """The last progress of a run; ids go to the ``streamer`` as they come."""
    counts: list[int] = []
    for progress in steps:
        if streamer is not None:
            before = counts or [0] * len(progress.counts)
            counts = progress.counts.tolist()
            rows = zip(progress.tokens, before, counts, strict=True)
            stream(streamer, [ids[i:n] for ids, i, n in rows])
    return progress


@dataclass(frozen=True)
class RoundText:
    """The text that a round added to a row: ``pieces``, each with whether it comes from accepted
    drafts, and the number of ``tokens``.
    """

    pieces: list[tuple[str, bool]]
    tokens: int

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(text for text, _ in self.pieces)


@dataclass
class Run:
    """A running batch: ``stops`` end answers and decode them, finished rows take the next sample of
    the ``queue``, ``settings`` go into the certificate, ``play`` runs a round.
    """

    method: str
    steps: Iterator[Progress]
    rule: Rule | None
    stops: StopStrings
    settings: Mapping[str, float]
    queue: Queue | None = None
    drafter: Drafter | None = None
    play: Play = one_round
    prompt_tokens: list[int] = field(default_factory=list)  # of each row
    longest: int = 0  # tokens that an answer may have
    ends: frozenset[int] = frozenset()  # tokens that end one
    failed: int = field(default_factory=uncompiled_calls)  # programs not built, before the first

    def finish_reasons(self, tokens: Sequence[Tensor]) -> list[str]:
        """Why each row's ``tokens`` end: "stop" by an end token or text, or "length"."""

        return [finish_reason(ids.tolist(), self.longest, self.ends, self.stops) for ids in tokens]

    @property
    def compiled(self) -> bool:
        """Whether programs have run rounds; CUDA graphs do so only after some uncompiled rounds."""
        if isinstance(self.play, GraphRound):
            return self.play.recorded is not None
        return self.play is not one_round

    @property
    def built(self) -> bool:
        """Whether every program since the run began could be built."""
        return uncompiled_calls() == self.failed

    def _played_ahead(self, ahead: bool) -> None:
        """Set whether the host may launch a round before it has read the last one's result: not
        while tokens are streamed.
        """
        if isinstance(self.play, GraphRound):
            self.play.ahead = ahead

    def finish(
        self, streamer: BaseStreamer | None = None
    ) -> tuple[list[str], list[Tensor], Progress]:
        """Texts and ids of all rows, and the last progress; ids go to the ``streamer``."""
        self._played_ahead(streamer is None)
        if streamer is not None and self.queue is not None and len(self.queue.generators) > 1:
            raise ValueError(
                f"a streamer takes one answer at a time, got {len(self.queue.generators)} questions"
            )
        end = last_of(self.steps, streamer)
        tokens = _committed(end) if self.queue is None else self.queue.tokens
        return [self.stops.cut(ids) for ids in tokens], tokens, end

    def rounds(self, apart: bool = True) -> Iterator[list[RoundText]]:
        """The text that each round added to every row, without text that may turn out to begin a
        stop.

        With ``apart`` accepted drafts are separate from the target's own tokens.
        """
        if self.queue is not None:
            raise ValueError(
                "batch_size must be 0 for a stream, which shows all answers as they grow"
            )
        self._played_ahead(False)
        texts: list[str] = []  # of each row so far
        counted: list[int] = []  # its tokens
        for progress in self.steps:
            rows = _committed(progress)
            ended = (progress.counts >= progress.limits).tolist()
            texts = texts or [""] * len(rows)
            counted = counted or [0] * len(rows)
            counts = [len(ids) for ids in rows]
            if counts == counted:
                continue  # the last progress, which only adds the counts of the run
            gained = _gains_by_row(progress) if apart else [(0, 0)] * len(rows)
            round_texts = []
            for row, ids in enumerate(rows):
                pieces = self._pieces(ids, ended[row], texts[row], *gained[row])
                round_texts.append(RoundText(pieces, counts[row] - counted[row]))
                texts[row] += round_texts[-1].text
            counted = counts
            yield round_texts

    def _pieces(
        self, ids: Tensor, ended: bool, shown: str, taken: int, drafted: int
    ) -> list[tuple[str, bool]]:
        """The text of ``ids`` after ``shown``, split where the last round's drafts lie."""
        text = self.stops.cut(ids) if ended else self.stops.sure(ids)
        if not (ended or text.startswith(shown)):
            return []  # shown text is never changed; more follows once the whole text extends it
        first, begin = len(ids) - taken, len(shown)
        ends = [len(self.stops.shown(ids[:n])) for n in (first, first + drafted)] if drafted else []
        bounds = [begin, *(min(max(end, begin), len(text)) for end in ends), len(text)]
        pieces = [(text[a:b], i == 1 and drafted > 0) for i, (a, b) in enumerate(pairwise(bounds))]
        return [piece for piece in pieces if piece[0]]

    def certificate(self, end: Progress) -> Certificate:
        """The certificate of the run, from its last progress ``end``."""
        return run_claim(self.rule, end, self.drafter).under(self.settings)

    def told(self, tokens: list[Tensor], end: Progress) -> dict[str, Any]:
        """The fields of :class:`Answered`, from the run's last progress ``end``."""
        return dict(
            tokens=tokens,
            stats=end.stats,
            certificate=self.certificate(end),
            method=self.method,
            compiled=self.compiled and self.built,
            prompt_tokens=self.prompt_tokens,
            finish_reasons=self.finish_reasons(tokens),
            taus=end.stats.taus,
        )


def finish_reason(
    ids: Sequence[int], longest: int, ends: Container[int], stops: StopStrings
) -> str:
    """Why an answer ``ids`` of at most ``longest`` tokens ends: "stop" by one of the tokens
    ``ends`` or a text of ``stops``, or "length".
    """
    stopped = len(ids) < longest or ids[-1] in ends or stops.stopped(list(ids))
    return "stop" if stopped else "length"


def _gains_by_row(progress: Progress) -> list[tuple[int, int]]:
    """By row, tokens of the last round and accepted drafts among them."""
    assert progress.gained is not None
    taken, accepted = (part.tolist() for part in progress.gained)
    # the last of those kept is the target's own
    return [(t, min(t, k - 1)) for t, k in zip(taken, accepted, strict=True)]


def _committed(progress: Progress) -> list[Tensor]:
    """The ids of each row so far."""
    counts = progress.counts.tolist()
    return [ids[:n].clone() for ids, n in zip(progress.tokens, counts, strict=True)]
