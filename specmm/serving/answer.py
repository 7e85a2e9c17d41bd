"""One answer as it grows in an engine: its text, its probabilities, its end.

Shape letters: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from specmm.core.sorting import largest
from specmm.hf.models.target import ProbsProcessor
from specmm.hf.prompts.options import Options
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.hf.prompts.stop_strings import PARTIAL, StopStrings
from specmm.serving.requests import Asked, Ended, Piece, Tell, TokenLogprob

FEW = 8  # tokens that are decoded again each time


class GrowingText:
    """The text of an answer whose tokens come one after the other.

    Only the last tokens are decoded each time; the text of an answer that may end by ``stops``, or
    where a text may lose blanks, is decoded whole. Blanks around it are left out if ``stripped``.
    """

    def __init__(self, stops: StopStrings, raw: Callable[[list[int]], str], stripped: bool) -> None:
        self.stops = stops
        self.raw = raw  # text of ids, with a sign for half a character
        self.stripped = stripped
        self.whole = bool(stops.texts) or stops.tidied
        self.ids: list[int] = []
        self.first = 0  # tokens before it are shown and not decoded again
        self.settled = ""  # their text
        self.shown = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` add and that can no longer change."""
        self.ids += ids
        if self.whole:
            return self._new(self.stops.sure(self.ids))
        tail = self.stops.shown(self.ids[self.first :])
        found = self._new(self.settled + tail)
        if len(self.ids) - self.first > 2 * FEW and not self.raw(self.ids).endswith(PARTIAL):
            keep = self.stops.shown(self.ids[-FEW:])
            if tail.endswith(keep):
                self.settled += tail[: len(tail) - len(keep)]
                self.first = len(self.ids) - FEW
        return found

    def end(self) -> str:
        """The rest of the text, after the last token."""
        text = self.stops.cut(self.ids)
        return self._new(text.strip() if self.stripped else text, last=True)

    def _new(self, text: str, last: bool = False) -> str:
        if self.stripped and not last:
            text = text.strip()
        if not text.startswith(self.shown):
            return ""  # shown text is never changed; more follows once the whole extends it
        found = text[len(self.shown) :]
        self.shown = text
        return found


@dataclass(eq=False)  # equal requests are not the same one
class Answer:
    """A request in an engine: its ``prompt`` as the model reads it, the ``limit`` of its tokens,
    the ``processor`` and the ``generator`` that draw them, and the tokens so far.
    """

    asked: Asked
    tell: Tell
    prompt: VLMPrompt
    options: Options
    processor: ProbsProcessor
    generator: torch.Generator
    limit: int
    text: GrowingText
    ids_of: Callable[[int], str]  # the text of one token
    deadline: float  # by time.monotonic()
    cancelled: bool = False
    over: bool = False
    rounds: int = 0
    cached: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    root: str = ""  # a name of what the prompt shows
    needed: int = 0  # tokens up to the end of its last picture
    weights: object = None  # that read its prompt

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def given_up(self) -> str:
        """Why the answer must end early ("cancelled" or "timeout"), else ""."""
        if self.cancelled:
            return "cancelled"
        return "timeout" if time.monotonic() > self.deadline else ""

    @cached_property
    def ids(self) -> list[int]:
        """The ids of the prompt."""
        return self.prompt.rows()[0]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)

    @property
    def room(self) -> int:
        """Tokens that prompt and answer may have."""
        return self.prompt_tokens + self.limit

    def heard(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Store the log-probabilities of ``tokens`` [n] by ``logits`` [n, V], if asked for."""
        if self.asked.logprobs is None:
            return
        scores = logits.float().log_softmax(-1)
        count = self.asked.logprobs
        best, which = largest(scores, count) if count else (scores[:, :0], scores[:, :0].long())
        rows = zip(tokens, scores, best.tolist(), which.tolist(), strict=True)
        for token, own, values, ids in rows:
            top = [self._said(i, value) for i, value in zip(ids, values, strict=True)]
            self.logprobs.append(self._said(token, float(own[token]), top))

    @property
    def weighs_prompt(self) -> bool:
        """Whether the prompt's log-probabilities were asked for."""
        return self.asked.echo and self.asked.logprobs is not None

    def begin(self) -> None:
        """Send the prompt, which has been read, if that was asked for."""
        if not self.asked.echo:
            return
        given, said = self.asked.prompt, self.logprobs
        text = given if isinstance(given, str) else self.text.stops.whole(self.ids)
        if self.weighs_prompt:
            first = self.ids[0]
            said = [TokenLogprob(first, self.ids_of(first), None), *said]
        self.logprobs = []
        self.tell(Piece(text, [], said))

    def _said(self, token: int, score: float, top: Sequence[TokenLogprob] = ()) -> TokenLogprob:
        return TokenLogprob(token, self.ids_of(token), score, top)

    def grow(self, tokens: Sequence[int]) -> None:
        """Send the text of ``tokens``."""
        if not tokens:
            return
        text = self.text.add(tokens)
        said, self.logprobs = self.logprobs[: len(tokens)], self.logprobs[len(tokens) :]
        self.tell(Piece(text, list(tokens), said))

    def end(self, reason: str, method: str = "", certificate: str = "", error: str = "") -> None:
        """Send the end, once."""
        if self.over:
            return
        self.over = True
        if reason in ("stop", "length") and (rest := self.text.end()):
            self.tell(Piece(rest, []))
        counts = (self.prompt_tokens, self.cached, len(self.text.ids), self.rounds)
        self.tell(Ended(reason, *counts, method, certificate, error))


class RowStops:
    """Ends rows at end tokens ``ids``, and at the stop texts of each row's answer."""

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self.ids = torch.tensor(list(ids), dtype=torch.int64, device=device)
        self.rows: list[Answer] = []  # in order

    def __call__(self, tokens: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        most = max(int((after - before).max()), 1)
        where = before[:, None] + torch.arange(most, device=tokens.device)
        ends = torch.isin(tokens.gather(1, where), self.ids) & (where < after[:, None])
        goes_on = [row.asked.goes_on for row in self.rows]
        if any(goes_on):
            ends &= ~torch.tensor(goes_on, device=ends.device)[:, None]
        done = ends.any(1)
        counts = torch.where(done, before + ends.int().argmax(1) + 1, after)
        for number, row in enumerate(self.rows):
            if row.text.stops.texts and bool(counts[number] > before[number]):
                some = slice(number, number + 1)
                count, ended = row.text.stops(tokens[some], before[some], counts[some])
                counts[number], done[number] = count[0], done[number] | ended[0]
        return counts, done

    def join(self) -> None:
        """The engine has put the answer there."""

    def leave(self, row: int) -> None:
        """Remove ``row``; the last row takes its place."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()
