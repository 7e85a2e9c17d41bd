"""The engine: many requests answered in one batch, whose rows join and leave between rounds.

Prompts are read in pieces beside rounds, or in their forwards where that keeps nobody waiting, so
that no answer waits long for another's prompt; several short ones are read at once. Every row has
its own settings, limit, stops and generator, and its tokens do not depend on other rows, except for
the rounding of products of other sizes.

Shape letters: N nodes, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from specmm.core.derived import written
from specmm.core.drafter import Drafter, Feedback
from specmm.core.processors import Processor
from specmm.core.rows import Rows
from specmm.core.stats import Clock
from specmm.core.turns import Turns, turns_of
from specmm.hf.answers.run import finish_reason
from specmm.hf.answers.running import Pipeline
from specmm.hf.models.rows import Reading, RowsTarget
from specmm.hf.models.single import engine_target
from specmm.hf.models.target import Context
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.loading.files import sentence_of
from specmm.loading.hardware import out_of_memory
from specmm.serving.answer import Answer, RowStops
from specmm.serving.costs import THOUSAND, ForwardSeconds, Pieces
from specmm.serving.drafting import Drafts, LateDrafter
from specmm.serving.prefixes import PAGE, Cut, Page, Prefixes, joined
from specmm.serving.preparation import Limits, Preparation
from specmm.serving.requests import Asked, Busy, Tell
from specmm.verify.claims import run_claim
from specmm.verify.matching import Matching

log = logging.getLogger(__name__)
ALL = 2**62  # tokens of a prompt, however long
ALONE = 4096  # tokens of prompts that are read at once where nobody is answered
ENDS = ("stop", "length", "cancelled", "timeout", "error")
READ = ("requests", "prompt_tokens", "cached_tokens", "read_seconds")
PLAYED = ("tokens", "rounds", "row_rounds", "round_seconds")
DRAFTED = ("drafted_tokens", "kept_tokens", "network_seconds")
COUNTS = dict.fromkeys((*READ, *PLAYED, *DRAFTED, *ENDS), 0)


@dataclass
class _Read:
    """Prompts being read, and their answers."""

    reading: Reading
    answers: list[Answer]


class BatchEngine:
    """Answers requests to the model of ``pipe``; see :class:`specmm.serving.requests.Engine`.

    ``stripped``: whether blanks around a chat's answer are left out. ``network(target)`` returns a
    drafter whose rows join and leave, with its name, to draft besides earlier text. If a model's
    rows cannot join a batch, requests are answered one after another.
    """

    def __init__(
        self,
        pipe: Pipeline,
        limits: Limits,
        stripped: bool = False,
        network: Callable[[RowsTarget], tuple[str, Drafter] | None] = lambda target: None,
    ) -> None:
        self.pipe = pipe
        self.make_network = network
        self.name = pipe.name
        self.limits = limits
        self.target = engine_target(pipe.model, pipe.name)
        if not self.target.joins:
            self.limits = replace(limits, rows=1)
        self.ends = pipe.ends()
        self.stops = RowStops(self.ends, self.target.device)
        self.waiting: deque[Answer] = deque()
        self.read: _Read | None = None
        self.beside: list[_Read] = []  # pieces to read in the next round
        self.told = 0.0  # when rows were last told their tokens
        self.costs, self.network_costs = ForwardSeconds(), ForwardSeconds()
        self.pieces = Pieces(self.costs)
        self.prefixes = Prefixes(limits.prefixes if self.target.resumes else 0)
        self.weights = written(pipe.model)  # that have read what they store
        self.made = Counter(COUNTS)
        self.closing = False
        self.deadline = 0.0
        self.changed = threading.Condition()
        self.preparation = Preparation(pipe, self.target, limits, stripped)
        self.rows = self._empty()
        self.thread = threading.Thread(target=self._work, name=f"engine {self.name}", daemon=True)
        self.thread.start()

    def submit(self, asked: Asked, tell: Tell) -> Answer:
        self._check_room()
        answer = self.preparation.answer(asked, tell)
        with self.changed:
            self._check_room()
            self.waiting.append(answer)
            self.made["requests"] += 1
            self.changed.notify()
        return answer

    def forget(self) -> None:
        """Forget earlier answers, but not the costs; only while nothing is answered."""
        with turns_of(self.pipe.model).take(object()):
            self.made = Counter(COUNTS)
            self.prefixes = Prefixes(self.prefixes.most)
            self.rows = self._empty()

    @property
    def ended(self) -> bool:
        return self.closing

    def counts(self) -> Mapping[str, float]:
        return {
            **{f"{name}_total": number for name, number in self.made.items()},
            "rows": self.rows.count,
            "waiting": len(self.waiting),
            "reading": int(bool(self.read)),
            "piece_tokens": self.pieces.size(),
            "prefix_bytes": self.prefixes.bytes,
        }

    def close(self, seconds: float = 0.0) -> None:
        with self.changed:
            self.closing = True
            self.deadline = time.monotonic() + seconds
            self.changed.notify()
        if threading.current_thread() is not self.thread:  # the collector runs in any thread
            self.thread.join()

    def _check_room(self) -> None:
        if self.closing:
            raise Busy("the server is stopping; ask another one")
        if len(self.waiting) >= self.limits.waiting:
            raise Busy(f"{len(self.waiting)} requests wait already; ask again later")

    # ---- in the engine's thread

    @torch.inference_mode()
    def _empty(self) -> Rows:
        """A batch without rows."""
        target = self.target
        self.stops.rows.clear()
        costs = self.costs, self.network_costs
        self.drafts = Drafts(target, self.make_network(target), self.limits.drafts, *costs)
        network = self.drafts.network
        if network is not None:  # a network sizes its memory by a prompt of one token
            prompt = VLMPrompt({**padded([[0]])}, 1).to(target.device, target.dtype)
            reading = Reading(target, prompt, [Processor(0.0)], 1, 1)
            reading.go_on(1)
            output = reading.output
            assert output is not None and isinstance(network, LateDrafter)
            target.open(self.drafts.max_nodes)
            target.join()
            target.prompt, target.context = prompt, reading.alone.context
            network.weigh()
            network.begin(Feedback(output, output.probs[:, -1].argmax(-1)), Clock())
            network.leave(0)
        target.open(self.drafts.max_nodes, self.limits.rows)
        return Rows(target, self.drafts, self.stops)

    @property
    def answers(self) -> list[Answer]:
        """The answers that have a row, by its number."""
        return self.stops.rows

    def _work(self) -> None:
        turns = turns_of(self.pipe.model)
        call = object()
        while True:
            with self.changed:
                while not (self._busy or self.closing):
                    call = object()  # the model is looked at anew
                    self.changed.wait()
            if self.closing and self._stopped():
                return
            with turns.take(call), torch.inference_mode():
                self._look()
                self._steps(turns)

    def _look(self) -> None:
        """Forget what was read by other weights; looked at once a turn, between which other threads
        may change them.
        """
        if (now := written(self.pipe.model)) != self.weights:
            self.weights = now
            self.prefixes = Prefixes(self.prefixes.most)

    @property
    def _busy(self) -> bool:
        """Whether there is anything to answer."""
        return bool(self.waiting or self.read or self.answers)

    def _steps(self, turns: Turns) -> None:
        """Steps within one turn (costly to begin) until another thread waits for its turn."""
        while True:
            try:
                self._step()
            except Exception as error:  # poisoned weights, or no memory
                self._begin_anew(error)
            if turns.waiting or self.closing or not self._busy:
                return

    def _stopped(self) -> bool:
        """Whether the engine is closed and everything is answered or its time is over."""
        left = [*self.answers, *self.waiting, *(self.read.answers if self.read else ())]
        if left and time.monotonic() < self.deadline:
            return False
        for answer in left:
            answer.end("error", error="the server was stopped before the answer ended")
        return True

    def _step(self) -> None:
        """Free cancelled rows, read a piece of a prompt, play a round."""
        for row in reversed(range(self.rows.count)):
            if reason := self.answers[row].given_up:
                self._leave(row, reason)
        with self.changed:
            for answer in [one for one in self.waiting if one.given_up]:
                self.waiting.remove(answer)
                self._give_up(answer)
        if not self.rows.count:
            self.told = time.perf_counter()
        self._read_some()
        if self.rows.count:
            self._round()

    def _read_some(self) -> None:
        """Read a piece of a prompt, beside the next round if there is one. Short prompts are read
        beside a long one, whose piece is then smaller.
        """
        if self.read is None:
            self.read = self._admit(ALL)
        elif short := self._admit(min(self._room(), Pieces.MOST)):
            self._read_piece(short, ALONE)
        if self.read is not None:
            self._read_piece(self.read, self._room(self.read.reading.read))

    @property
    def _spent(self) -> float:
        """Seconds since the last round."""
        return time.perf_counter() - self.told

    def _room(self, before: int = 0) -> int:
        """How many tokens of a prompt to read now, after ``before`` tokens."""
        if not self.rows.count:
            return ALONE
        plain = self.costs.of(self.rows.count, 0, self._attended)
        return self.pieces.size(before, self._spent, plain)

    @property
    def _attended(self) -> float:
        """Thousands of tokens that rows attend."""
        return float(self.target.cache.lengths.sum()) / THOUSAND

    def _admit(self, most: int) -> _Read | None:
        """Begin to read the first waiting prompt with at most ``most`` unread tokens, together with
        later ones that can be read in one forward with it, if rows are free.
        """
        free = self.limits.rows - self.rows.count - (len(self.read.answers) if self.read else 0)
        together: list[Answer] = []
        pages: list[Page] = []
        with self.changed:
            for answer in [*self.waiting]:
                if len(together) == free or pages:
                    break
                known = self._known(answer)
                if together:
                    fits = not known and self._fit([*together, answer])
                else:
                    fits = answer.prompt_tokens - len(known) * PAGE <= most
                if fits:
                    self.waiting.remove(answer)
                    together.append(answer)
                    pages = known
                elif together:
                    break
        if not together:
            return None
        try:
            return self._begin(together, pages)
        except Exception as error:  # without memory
            self._failed(together, error)
            return None

    def _fit(self, answers: Sequence[Answer]) -> bool:
        """Whether the prompts of ``answers`` can be read in one forward that takes no longer than a
        piece may.
        """
        if any(one.prompt.vision for one in answers) or not self.target.reads_ragged:
            return False
        widest = max(one.prompt_tokens for one in answers)
        if widest > Pieces.MOST and any(one.weighs_prompt for one in answers):
            return False
        return widest * len(answers) <= self._room()

    def _known(self, answer: Answer) -> list[Page]:
        """The stored pages of an answer's prompt, without the page of its last token."""
        if answer.weighs_prompt:  # its log-probabilities need a new forward
            return []
        pages = self.prefixes.find(answer.root, answer.ids[:-1])
        return pages if len(pages) * PAGE >= max(answer.needed, 1) else []

    def _begin(self, answers: list[Answer], pages: Sequence[Page]) -> _Read:
        """Begin to read the prompts of ``answers``, or of one the part after ``pages``."""
        prompt = answers[0].prompt
        if len(answers) > 1:
            prompt = VLMPrompt({**padded([one.ids for one in answers])}, 1)
        prompt = prompt.to(self.target.device, self.target.dtype)
        for one in answers:
            one.weights = self.weights
        own = [one.processor for one in answers]
        room = max(one.room for one in answers) + self.target.scratch
        hear = [one.heard if one.weighs_prompt else None for one in answers]
        reading = Reading(self.target, prompt, own, room, Pieces.MOST, hear)
        if pages:
            reading.resume(*joined(pages, self.drafts.network is not None))
            answers[0].cached = len(pages) * PAGE
            self.made["cached_tokens"] += answers[0].cached
        return _Read(reading, answers)

    def _keep_prompt(self, answer: Answer, reading: Reading, number: int) -> None:
        """Store pages of a prompt that was read."""
        context = reading.row(number).context
        if context is not None and context.positions is not None:
            context = None  # positions in parts are those of whole prompts
        self._keep(answer, answer.ids, Cut(reading.alone.cache, number, context))

    def _keep_answer(self, row: int) -> None:
        """Store pages of a prompt with its answer, for the next turn of a chat."""
        answer, cache = self.answers[row], self.target.cache
        start, known = answer.prompt_tokens, int(cache.lengths[row])
        context = None
        if states := self.drafts.rows[row].states:
            hidden = torch.cat(states)[None, 1:]  # the first is the prompt's
            known = min(known, start + hidden.shape[1])
            said = answer.text.ids[: known - start]
            tokens = torch.tensor([said], dtype=torch.int64, device=hidden.device)
            image = torch.zeros_like(tokens, dtype=torch.bool)
            context = Context(hidden, self.target.embed(tokens), tokens.new_tensor([known]), image)
        ids = [*answer.ids, *answer.text.ids][:known]
        self._keep(answer, ids, Cut(cache, row, context, start))

    def _keep(self, answer: Answer, ids: Sequence[int], cut: Cut) -> None:
        """Store pages of the text ``ids`` of an answer, if these weights have read all of it."""
        if answer.weights is self.weights:
            self.prefixes.keep(answer.root, ids, cut.page)

    def _read_piece(self, read: _Read, count: int) -> None:
        """Read a piece of ``count`` tokens of each prompt in ``read``, now or beside the next
        round; finished prompts join the batch.
        """
        if all(one.given_up for one in read.answers):
            self._forget(read)
            for one in read.answers:
                self._give_up(one)
            return
        start = time.perf_counter()
        reading = read.reading
        before, left = reading.read, reading.left
        try:
            packs = self.rows.count and reading.packs
            if packs and self.pieces.ride(before, min(count, left)):
                self.target.beside.append(reading.next(count))
                self.beside.append(read)
                return
            reading.go_on(count)
            tokens = (left - reading.left) * len(read.answers)
            seconds = time.perf_counter() - start
            self.costs.observe(seconds, 0, 0, 0, tokens, before * tokens / THOUSAND)
            self.made["prompt_tokens"] += tokens
            self.made["read_seconds"] += seconds  # type: ignore[assignment]
        except Exception as error:  # whatever a prompt does to the model, the others go on
            self._forget(read)
            self._failed(read.answers, error)
            return
        self._have_read(read)

    def _have_read(self, read: _Read) -> None:
        """After a piece was read: join the batch if it was the last one."""
        if read.reading.left:
            return
        self._forget(read)
        for number, answer in enumerate(read.answers):
            try:
                self._join(answer, read.reading, number)
            except Exception as error:
                self._failed([answer], error)
                if self.rows.count != len(self.answers):
                    self._begin_anew(error)

    def _forget(self, read: _Read) -> None:
        """Drop prompts that are read, or never will be."""
        if read is self.read:
            self.read = None

    def _join(self, answer: Answer, reading: Reading, number: int) -> None:
        if answer.given_up:
            self._give_up(answer)
            return
        reading.output_of(number)  # whether all is well, before anything of it is kept
        self._keep_prompt(answer, reading, number)
        self.stops.rows.append(answer)
        row = self.rows.join(
            answer.generator, lambda row: self.target.take(row, reading, number), answer.limit
        )
        answer.begin()
        answer.heard(reading.alone.logits[number], self.rows.progress.row(row)[:1].tolist())
        self._told(row, 0, 1)
        if row in self.rows.progress.ended():
            self._finish(row)

    def _round(self) -> None:
        """Play a round, send its tokens, end the finished rows."""
        start = time.perf_counter()
        progress = self.rows.progress
        before = progress.counts.tolist()
        self.drafts.left = float((progress.limits - progress.counts).sum())
        pieces = [(piece.reading.read, piece.ids.numel()) for piece in self.target.beside]
        tokens = sum(count for _, count in pieces)
        pairs = sum(known * count for known, count in pieces) / THOUSAND
        reading = self.costs.read(tokens, pairs)
        self.drafts.attended = self._attended
        self.drafts.most_seconds = self.pieces.left(self._spent) - reading
        gained = self.rows.round()
        seconds = time.perf_counter() - start
        self.drafts.observe(self.rows.feedback, seconds, tokens, pairs)
        reading = min(reading, seconds / 2)
        seconds -= reading
        self.made["read_seconds"] += reading  # type: ignore[assignment]
        self.pieces.played(seconds)
        self.made.update(rounds=1, row_rounds=self.rows.count, prompt_tokens=tokens)
        self.made["round_seconds"] += seconds  # type: ignore[assignment]
        self.made.update(drafted_tokens=self.drafts.offered, kept_tokens=self.drafts.taken)
        self.made["network_seconds"] += self.drafts.spent  # type: ignore[assignment]
        spoilt = self._spoilt()
        for row, answer in enumerate(self.answers):
            answer.rounds += 1
            if row in spoilt:
                continue
            if answer.asked.logprobs is not None:
                self._heard(row, gained[row])
            self._told(row, before[row], before[row] + gained[row])
        self.told = time.perf_counter()
        ended = progress.ended()
        for row in reversed(range(self.rows.count)):
            if row in spoilt:
                self._drop(row, spoilt[row])
            elif row in ended:
                self._finish(row)
        beside, self.beside = self.beside, []
        for read in beside:
            self._have_read(read)

    def _spoilt(self) -> dict[int, Exception]:
        """The rows that failed in the last round, with the error.

        Raises ``ValueError`` if numbers other than a row's logits were not finite.
        """
        try:
            self.rows.check()
        except ValueError:
            if found := self.target.spoilt():
                return found
            raise
        return dict(self.target.processor.failed)

    def _heard(self, row: int, gained: int) -> None:
        """Store the log-probabilities of the ``gained`` tokens of a ``row`` in the last round."""
        path = self.rows.feedback.drafted[1].path[row, :gained]
        tokens = self.rows.progress.row(row)[-gained:].tolist() if gained else []
        self.answers[row].heard(self.target.logits[row, path], tokens)

    def _told(self, row: int, before: int, after: int) -> None:
        """Send the tokens of a ``row`` from ``before`` on."""
        tokens = self.rows.progress.tokens[row, before:after].tolist()
        self.drafts.extend(row, tokens)
        self.made["tokens"] += len(tokens)
        self.answers[row].grow(tokens)

    def _finish(self, row: int) -> None:
        """End the answer of a finished ``row``."""
        answer = self.answers[row]
        ends = () if answer.asked.goes_on else self.ends
        text = answer.text
        self._leave(row, finish_reason(text.ids, answer.limit, ends, text.stops))

    def _leave(self, row: int, reason: str) -> None:
        answer = self.answers[row]
        settings = answer.options.settings | self.target.noise
        claim = run_claim(Matching(), self.rows.progress, None).under(settings)
        self._keep_answer(row)  # first, for whoever is told may ask the next question
        answer.end(reason, self.drafts.method, str(claim), self._why(reason))
        self.made[reason] += 1
        self.rows.leave(row)

    def _drop(self, row: int, error: Exception) -> None:
        """End the answer of a failed ``row`` and remove it."""
        self._failed([self.answers[row]], error)
        self.target.cache.clear(row)
        self.rows.leave(row)

    def _give_up(self, answer: Answer) -> None:
        """End an ``answer`` that was given up before it had a row."""
        reason = answer.given_up
        answer.end(reason, error=self._why(reason))
        self.made[reason] += 1

    def _why(self, reason: str) -> str:
        """The sentence that an answer ends with, if it is an error."""
        if reason != "timeout":
            return ""
        return f"an answer may take {self.limits.seconds:g} seconds here, and this one took longer"

    def _failed(self, answers: Sequence[Answer], error: Exception) -> None:
        said = sentence_of(error)
        if not isinstance(error, ValueError):
            log.error("%s failed: %s", self.name, said, exc_info=error)
        for answer in answers:
            answer.end("error", error=said)
            self.made["error"] += 1

    def _begin_anew(self, error: Exception) -> None:
        """After an ``error`` that may have spoilt the batch: end its answers and go on with an
        empty batch. If it was empty, the waiting requests end with the error, which would come
        again.
        """
        if out_of_memory(error) and (count := self.rows.count) > 1:
            log.warning("%s: memory ran out, going on with %d rows", self.name, count // 2)
            self.limits = replace(self.limits, rows=count // 2)
        failed = list(self.answers)
        for read in self.beside:
            self._forget(read)
            failed += read.answers
        self.beside, self.target.beside = [], []
        if not failed:
            with self.changed:
                failed = list(self.waiting)
                self.waiting.clear()
        self._failed(failed, error)
        try:
            self.rows = self._empty()
        except Exception as again:  # nothing can be answered any more
            log.error("%s ends: %s", self.name, sentence_of(again), exc_info=again)
            self.stops.rows.clear()
            self.closing = True
