"""What a server asks of an engine, and what an engine tells: the line between the two.

An engine answers many requests in one batch whose rows join and leave between rounds. It runs in a
thread of its own and tells what it has made by a function that each request brings.
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
    ``tools``. ``logprobs``: how many of the likeliest tokens to tell beside each one of the answer;
    None tells nothing of the kind. With ``goes_on`` end tokens do not end the answer. With ``echo``
    the prompt is told before it, and how likely its tokens were, too. Special tokens are left out
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
    """A ``token``, its text and the log of its probability by the model, before temperature and
    filters; ``top`` are the likeliest, also in this form. A text's first one has none of these.
    """

    token: int
    text: str
    logprob: float | None
    top: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Piece:
    """What a round added to an answer: a ``text``, which no later round changes, its ``tokens``
    and, where asked for, their ``logprobs``. The text may lag behind the tokens.
    """

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Ended:
    """An answer's end: its ``reason`` ("stop", "length", "cancelled", "timeout" or "error", the
    last two with the ``error`` in a sentence), how many ``prompt_tokens`` were read, of which
    ``cached`` were known from earlier requests, how many ``tokens`` it has, in how many ``rounds``,
    and what it claims: the ``method`` and the ``certificate``, in words.
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
    """As many requests wait as may; ask again later."""


class Ticket(Protocol):
    """A request that was taken; ``ids`` are its prompt's."""

    @property
    def ids(self) -> Sequence[int]: ...

    def cancel(self) -> None:
        """Nobody waits for it any more: its row is free before the next round. From any thread, as
        often as one likes.
        """


class Engine(Protocol):
    """Answers requests of the model of ``pipe``, whose end tokens are ``ends``; its methods may be
    called from any thread.
    """

    name: str
    pipe: Any
    ends: list[int]

    def submit(self, asked: Asked, tell: Tell) -> Ticket:
        """Take a request. What is read of it (tokens, pixels) is made here, in the caller's thread.

        Raises ``ValueError`` for one that cannot be answered, and :class:`Busy`.
        """

    @property
    def ended(self) -> bool:
        """Whether it takes no requests any more: it is closed, or cannot go on."""

    def counts(self) -> Mapping[str, float]:
        """Numbers since the start, by name: those of Prometheus' counters and gauges."""

    def close(self, seconds: float = 0.0) -> None:
        """Take no more requests, give those that there are ``seconds`` to end, and stop."""
