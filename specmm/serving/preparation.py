"""From a request to an answer that can begin: its prompt, processor, generator and limit.

Answers are prepared in the caller's thread, beside the engine's rounds.
"""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass, replace

import torch

from specmm import methods
from specmm.hf.answers.running import Pipeline
from specmm.hf.models.rows import RowsTarget
from specmm.hf.prompts.options import Options
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.serving.answer import Answer, GrowingText
from specmm.serving.prefixes import digest_of
from specmm.serving.requests import Asked, Tell

OF_THE_SERVER = (  # options of calls that requests have not
    "batch_size",
    "compiled",
    "draw",
    "drafter",
    "method",
    "rule",
    "stopping_criteria",
    "tree",
)


@dataclass(frozen=True)
class Limits:
    """The most ``rows`` at a time, waiting requests, and tokens of prompt and answer (0: the
    model's limit); whether anything is drafted. An answer without a limit of its own has at most
    ``answer`` tokens, if there is room. It may take ``seconds`` from its request on. ``prefixes``
    bounds the bytes of stored pages.
    """

    rows: int = 16
    waiting: int = 256
    tokens: int = 0
    drafts: bool = True
    answer: int = 1024
    seconds: float = 600.0
    prefixes: int = 2**30


class Preparation:
    """Makes answers of requests to the model of ``pipe``, within ``limits``, for its ``target``.

    ``stripped``: whether blanks around a chat's answer are left out.
    """

    def __init__(self, pipe: Pipeline, target: RowsTarget, limits: Limits, stripped: bool) -> None:
        self.pipe = pipe
        self.target = target
        self.limits = limits
        self.stripped = stripped
        self._one = threading.Lock()

    def room(self, length: int) -> int:
        """Tokens that a prompt of ``length`` and its answer may have."""
        return min(filter(None, (self.limits.tokens, self.target.room_for(length))))

    def answer(self, asked: Asked, tell: Tell) -> Answer:
        """The answer for ``asked``, ready to begin, from any thread; raises ``ValueError``."""
        with self._one:  # tokenizers and processors are not for several threads
            return self._answer(asked, tell)

    def _answer(self, asked: Asked, tell: Tell) -> Answer:
        pipe, target = self.pipe, self.target
        options, prompt = self._read(asked)
        target.check(prompt)
        if asked.echo and asked.logprobs is not None and not target.reads_pieces:
            raise ValueError(
                f"how likely a prompt is cannot be told of {target.name}; leave echo out"
            )
        length = int(prompt.lengths[0])
        room = self.room(length)
        limit = asked.options.get("max_new_tokens") or min(self.limits.answer, room - length)
        if limit < 1 or length + limit > room:
            raise ValueError(
                f"prompt and answer must fit {room} tokens, got {length} of the prompt and "
                f"max_tokens {max(limit, 1)}; shorten one of them"
            )
        [generator] = options.generators(1, target.device)
        alone = copy.copy(target)
        alone.processor = options.processor  # type: ignore[assignment]
        method = methods.Suffix() if self.limits.drafts else methods.AR()
        pipe.constrain(alone, method, options, prompt)
        own = alone.processor
        tokenizer = pipe.tokenizer

        def raw(ids: list[int]) -> str:
            return str(tokenizer.decode(ids[-4:], skip_special_tokens=True))

        def one(token: int) -> str:
            return str(tokenizer.decode([token]))

        stops = pipe.stops(options)
        if asked.marks:
            added = tokenizer.added_tokens_decoder.items()
            hidden = {i for i, one in added if one.special and i not in asked.marks}
            stops.shown = lambda ids: stops.whole([i for i in ids if i not in hidden])
        text = GrowingText(stops, raw, self.stripped and asked.messages is not None)
        prompt = replace(prompt, max_new_tokens=1)
        end = time.monotonic() + self.limits.seconds
        answer = Answer(asked, tell, prompt, options, own, generator, limit, text, one, end)
        if prompt.vision:
            answer.root = digest_of(prompt.vision)
            shown = torch.isin(prompt.input_ids[0], torch.tensor(target.image_tokens)).nonzero()
            answer.needed = int(shown.max()) + 1 if len(shown) else length
        return answer

    def _read(self, asked: Asked) -> tuple[Options, VLMPrompt]:
        given = {"max_new_tokens": 1, **asked.options}
        if asked.messages is not None:
            given["messages"] = list(asked.messages)
        else:
            given["chat"] = False  # a prompt is continued as it is
        options = self.pipe.options(given)
        for name in OF_THE_SERVER:
            if given.get(name):
                raise ValueError(f"{name} is the server's, and not of a request; leave it out")
        known = self.target.family.vocabulary
        for ids, _ in options.more.get("sequence_bias", ()):
            if not all(token < known for token in ids):  # transformers would say so amid a round
                raise ValueError(
                    f"logit_bias must be of the {known} tokens there are, got {ids[0]}"
                )
        if asked.messages is not None:
            options.messages[0] = replace(options.messages[0], more=asked.more)
        prompt = asked.prompt
        if prompt is None or isinstance(prompt, str):
            return options, self.pipe.read(prompt, options)
        if shown := set(prompt).intersection(self.target.image_tokens):
            raise ValueError(
                f"prompt must hold no stand-ins of pictures, got token {min(shown)}; send a chat"
            )
        return options, self.pipe.read([list(prompt)], options)
