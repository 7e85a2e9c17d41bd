"""The interface between a server and an engine: requests and events.

An engine answers many requests in one batch whose rows join and leave between rounds. It runs in a
thread of its own and sends events to a function that each request brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True)
class Asked:
    """A request for one answer: ``messages`` as OpenAI writes them, with their pictures opened, or
    a ``prompt`` (a text, or ids), and ``options`` of a call of the pipeline (``max_new_tokens``,
    ``temperature``, ``seed``, ``stop``, ``grammar`` …). ``more`` goes to the chat template, as
    ``tools``. ``logprobs`` is the number of likeliest tokens to send with each token of the answer;
    None sends no log-probabilities. With ``goes_on`` end tokens do not end the answer. With
    ``echo`` the prompt is sent first, with its own log-probabilities. Special tokens are left out
    of its text, but for ``marks``.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    goes_on: bool = False
    echo: bool = False
    marks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenLogprob:
    """A ``token``, its text and its log-probability by the model, before temperature and filters;
    ``top`` are the likeliest tokens in the same form. The first token of a text has no
    log-probability.
    """

    token: int
    text: str
    logprob: float | None
    top: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Piece:
    """Event: a round's addition to an answer. Its ``text`` does not change later; ``tokens`` and,
    if asked for, their ``logprobs``. The text may lag behind the tokens.
    """

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Ended:
    """An answer's end: its ``reason`` ("stop", "length", "cancelled", "timeout" or "error", the
    last two with the ``error`` in a sentence), the number of ``prompt_tokens``, of which ``cached``
    came from stored pages, its number of ``tokens`` and ``rounds``, and the ``method`` and
    ``certificate`` as text.
    """

    reason: str
    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    rounds: int = 0
    method: str = ""
    certificate: str = ""
    error: str = ""


Tell: TypeAlias = Callable[[Piece | Ended], None]
"""Called by the engine's thread, with pieces and at last one end; it must not wait."""


class Busy(Exception):
    """The queue of waiting requests is full; ask again later."""


class Ticket(Protocol):
    """A request that was taken; ``ids`` are its prompt's."""

    @property
    def ids(self) -> Sequence[int]: ...

    def cancel(self) -> None:
        """Cancel the request: its row is freed before the next round. May be called from any
        thread, repeatedly.
        """


class Engine(Protocol):
    """Answers requests of the model of ``pipe``, whose end tokens are ``ends``; its methods may be
    called from any thread.
    """

    name: str
    pipe: Any
    ends: list[int]

    def submit(self, asked: Asked, tell: Tell) -> Ticket:
        """Take a request; its inputs (tokens, pixels) are prepared here, in the caller's thread.

        Raises ``ValueError`` for a request that cannot be answered, and :class:`Busy`.
        """

    @property
    def ended(self) -> bool:
        """Whether it no longer takes requests: it was closed, or cannot go on."""

    def counts(self) -> Mapping[str, float]:
        """Counts since the start by name, for Prometheus' counters and gauges."""

    def close(self, seconds: float = 0.0) -> None:
        """Take no more requests, give running ones ``seconds`` to end, and stop."""
