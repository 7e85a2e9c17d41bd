"""Answers in the form of OpenAI's chat completions and completions, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specmm.serving.asking import Wanted
from specmm.serving.parsing import Parser, Parts, Plain
from specmm.serving.requests import Ended, Piece, TokenLogprob

LEAST = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Form:
    """One of the two forms: its ``prefix`` of ids, the ``kind`` of a whole answer and that of a
    ``chunk``.
    """

    prefix: str
    kind: str
    chunk: str

    def head(self, model: str, stream: bool) -> dict[str, Any]:
        """The first fields of a response, or of each of its chunks."""
        kind = self.chunk if stream else self.kind
        now = int(time.time())
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": now, "model": model}

    def choice(
        self,
        number: int,
        parts: Parts,
        logprobs: Any = None,
        reason: str | None = None,
        name: str = "delta",
    ) -> dict[str, Any]:
        """Some ``parts`` of an answer, the ``reason`` why it ended, or a whole "message"."""
        said = {name: parts} if self is CHAT else {"text": parts.get("content", "")}
        return {"index": number, **said, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """The log probabilities of ``tokens``, the first of which begins at ``offset``."""
        if self is CHAT:
            listed = [{**_told(t), "top_logprobs": [_told(o) for o in t.top]} for t in tokens]
            return {"content": listed, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                None if t.logprob is None else {o.text: _finite(o.logprob) for o in t.top}
                for t in tokens
            ],
            "text_offset": offsets,
        }


CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk")
COMPLETION = Form("cmpl", "text_completion", "text_completion")


def _message(parts: Parts) -> Parts:
    """A whole message of ``parts``; one of calls alone has no content."""
    made = parts.get("tool_calls", ())
    calls = [{k: v for k, v in call.items() if k != "index"} for call in made]
    more = {"tool_calls": calls} if calls else {}
    content = None if calls else ""
    return {"role": "assistant", "content": content, "refusal": None, **parts, **more}


def _told(token: TokenLogprob) -> dict[str, Any]:
    """A token in a chat's logprobs."""
    letters = list(token.text.encode(errors="replace"))
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": letters}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


class Sums:
    """The growing answers to a request ``wanted``, in a ``form``, each parsed by one of the
    ``parsers``.
    """

    def __init__(self, form: Form, wanted: Wanted, parsers: Sequence[Plain | Parser]) -> None:
        self.form = form
        self.wanted = wanted
        self.parsers = parsers
        count = len(wanted.asked)
        self.said: list[Parts] = [{} for _ in range(count)]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self.offsets = [0] * count
        self.ends: list[Ended | None] = [None] * count

    def add(self, number: int, event: Piece | Ended) -> list[dict[str, Any]]:
        """Record an ``event`` of answer ``number``; returns the choices of its chunks."""
        if isinstance(event, Ended):
            rest = self._said(number, self.parsers[number].end())
            called = event.reason == "stop" and "tool_calls" in self.said[number]
            self.ends[number] = replace(event, reason="tool_calls") if called else event
            end = self.form.choice(number, {}, None, "tool_calls" if called else event.reason)
            return [self.form.choice(number, rest), end] if rest else [end]
        told = None
        if self.wanted.asked[number].logprobs is not None:
            self.logprobs[number] += event.logprobs
            told = self.form.logprobs(event.logprobs, self.offsets[number])
            self.offsets[number] += sum(len(one.text) for one in event.logprobs)
        parts = self._said(number, self.parsers[number].add(event))
        return [self.form.choice(number, parts, told)] if parts or event.logprobs else []

    def _said(self, number: int, parts: Parts) -> Parts:
        """Note ``parts`` of answer ``number``."""
        whole = self.said[number]
        for name, part in parts.items():
            whole[name] = whole[name] + part if name in whole else part
        return parts

    @property
    def first(self) -> list[dict[str, Any]]:
        """Choices of the first chunks, which give the role of a chat's answers."""
        first = {"role": "assistant", "content": ""}
        return [CHAT.choice(i, first) for i in range(len(self.said))] if self.form is CHAT else []

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return None not in self.ends

    @property
    def ended(self) -> list[Ended]:
        """The ends of all answers that have one."""
        return [end for end in self.ends if end is not None]

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's count of tokens; a prompt counts once, however many its answers."""
        each = self.ended[:: self.wanted.n]
        read, made = sum(e.prompt_tokens for e in each), sum(e.tokens for e in self.ended)
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": sum(e.cached for e in each)},
        }

    @property
    def unknown_usage(self) -> dict[str, Any]:
        """The usage field of chunks before the last one."""
        return {"usage": None} if self.wanted.usage else {}

    @property
    def own(self) -> dict[str, Any]:
        """Our own field: method, tokens a round, and certificate."""
        rounds = sum(end.rounds for end in self.ended)
        tokens = sum(end.tokens for end in self.ended)
        first = self.ended[0]
        tau = tokens / rounds if rounds else 0.0
        return {"method": first.method, "tau": tau, "certificate": first.certificate}

    def whole(self, head: dict[str, Any]) -> dict[str, Any]:
        """The response of all answers."""
        choices = []
        for number, end in enumerate(self.ended):
            asked = self.wanted.asked[number].logprobs is not None
            told = self.form.logprobs(self.logprobs[number], 0) if asked else None
            message = _message(self.said[number])
            choices.append(self.form.choice(number, message, told, end.reason, "message"))
        return {**head, "choices": choices, "usage": self.usage, "specmm": self.own}
