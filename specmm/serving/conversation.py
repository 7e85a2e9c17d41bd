"""A conversation in which each turn reads only the tokens that earlier turns have not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from specmm.core.derived import Derived
from specmm.core.turns import turns_of
from specmm.hf.answers.running import Pipeline
from specmm.serving.engine import BatchEngine
from specmm.serving.opening import engine_of
from specmm.serving.preparation import Limits
from specmm.serving.requests import Asked, Ended, Piece


class Conversation:
    """A chat with the model of ``pipe``, a :class:`specmm.VQAPipeline` or
    :class:`specmm.TextPipeline`.

    The ``messages`` so far are in OpenAI's form, and may be changed; ``last`` is how the last
    answer ended: tokens read and taken over from earlier turns, method, certificate. The keys and
    values of earlier turns are kept, 1 GiB at most, as long as the model has the same weights.
    ``options`` are those of each answer (``max_new_tokens``, ``temperature``, ``seed``, ``stop``,
    ``grammar`` …). ``method``: "ar" drafts nothing, "suffix" from what was said, "auto" also with
    the model's drafter; whatever is drafted, a seed's tokens are plain decoding's.
    """

    def __init__(self, pipe: Pipeline, method: str = "auto", **options: Any) -> None:
        self.pipe = pipe
        self.method = method
        self._engine: Derived[BatchEngine] = Derived()
        self._close: Callable[[], object] = lambda: None
        self.options = options
        self.engine()
        self.messages: list[dict[str, Any]] = []
        self.last: Ended | None = None

    def engine(self) -> BatchEngine:
        """The engine; it is made anew if the weights have changed since the last turn."""
        model = self.pipe.model
        with turns_of(model).take():
            return self._engine.of([*model.parameters(), *model.buffers()], self._made)

    def _made(self) -> BatchEngine:
        self._close()
        made = engine_of(self.pipe, Limits(rows=1), self.method)
        self._close = weakref.finalize(self, made.close)
        return made

    def ask(self, text: str, images: Sequence[Any] = ()) -> str:
        """The answer to ``text`` and ``images``, each a picture, path or address.

        Raises ``ValueError`` for a question that cannot be answered, which is then forgotten.
        """
        return "".join(self.stream(text, images))

    def stream(self, text: str, images: Sequence[Any] = ()) -> Iterator[str]:
        """As :meth:`ask`, in pieces. Closing the iterator ends and forgets the answer."""
        said: SimpleQueue[Piece | Ended] = SimpleQueue()
        parts = [{"type": "image", "image": image} for image in images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        asked = [*self.messages, {"role": "user", "content": content}]
        ticket = self.engine().submit(Asked(asked, options=self.options), said.put)
        answer = ""
        try:
            while isinstance(one := said.get(), Piece):
                answer += one.text
                if one.text:
                    yield one.text
        finally:
            ticket.cancel()
        if one.error:
            raise ValueError(one.error)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self.last = one
