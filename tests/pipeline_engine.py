"""An engine that answers one request after the other by a pipeline: what tests of the server take
where a batch is not what they are about.
"""

import threading
from contextlib import suppress

import torch

from specmm.serving.requests import Busy, Ended, Piece, TokenLogprob


class PipelineEngine:
    def __init__(self, pipe, name, waiting=64):
        self.pipe, self.name, self.waiting = pipe, name, waiting
        self.rows, self.total = set(), 0
        self.cancelled = 0
        self.turn, self.closed = threading.Lock(), False

    def submit(self, asked, tell):
        if len(self.rows) >= self.waiting:
            raise Busy("as many requests wait as may")
        options = dict(asked.options)
        options.setdefault("max_new_tokens", 64)
        if asked.messages is not None:
            run = self.pipe.begin(messages=asked.messages, **options)
        else:
            ids = not isinstance(asked.prompt, str)
            text = self.pipe.tokenizer.decode(asked.prompt) if ids else asked.prompt
            run = self.pipe.begin(text, **options)
        ticket = Row(self, run, asked, tell)
        self.rows.add(ticket)
        self.total += 1
        threading.Thread(target=ticket.answer, daemon=True).start()
        return ticket

    def counts(self):
        return {"rows": len(self.rows), "answers_total": self.total}

    def close(self, seconds=0.0):
        self.closed = True
        until = threading.Event()
        for _ in range(int(seconds / 0.05)):
            if not self.rows:
                return
            until.wait(0.05)
        for row in list(self.rows):
            row.cancel()


class Row:
    def __init__(self, engine, run, asked, tell):
        self.engine, self.run, self.asked, self.tell = engine, run, asked, tell
        self.stop = threading.Event()

    def cancel(self):
        self.stop.set()

    def answer(self):
        try:
            with self.engine.turn:
                end = self._answered()
        except Exception as error:
            end = Ended("error", error=str(error))
        self.engine.rows.discard(self)
        self.engine.cancelled += end.reason == "cancelled"
        self.tell(end)

    def _answered(self):
        run, shown, made = self.run, "", 0
        for progress in run.steps:
            if self.stop.is_set():
                return Ended("cancelled")
            ids = progress.tokens[0][: progress.counts[0]].clone()
            ended = bool(progress.counts[0] >= progress.limits[0])
            whole = run.stops.cut(ids) if ended else run.stops.sure(ids)
            new = ids[made:].tolist()
            if new or len(whole) > len(shown):
                told = self._logprobs(new) if self.asked.logprobs is not None else ()
                self.tell(Piece(whole[len(shown) :], new, told))
            shown, made = whole, len(ids)
        with suppress(AttributeError):
            claim = str(run.certificate(progress))
        reason = run.finish_reasons([ids])[0]
        rounds = progress.stats.rounds
        return Ended(reason, run.prompt_tokens[0], 0, made, rounds, run.method, claim)

    def _logprobs(self, new):
        """Made up: all tokens are as likely."""
        size = self.engine.pipe.model.config.get_text_config().vocab_size
        lp = -float(torch.tensor(float(size)).log())
        text = self.engine.pipe.tokenizer.decode
        top = [TokenLogprob(i, text([i]), lp) for i in range(5, 5 + self.asked.logprobs)]
        return [TokenLogprob(i, text([i]), lp, top) for i in new]
