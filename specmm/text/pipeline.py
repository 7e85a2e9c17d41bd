"""``TextPipeline``: text continued by a causal language model of transformers, by any method.

Shape letters: B prompts of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from specmm import methods
from specmm.choose.when_compiled import Work, Works
from specmm.core.decode import room
from specmm.core.turns import in_its_turn, turns_of
from specmm.extending.kinds import texts_of
from specmm.extending.registry import named
from specmm.hf.answers.run import Answered, RoundText, Run, ending
from specmm.hf.answers.running import Pipeline
from specmm.hf.answers.shared_rounds import SharedRounds
from specmm.hf.drafters.drafter_formats import ModelFolder, sees
from specmm.hf.loading.placing import Placing
from specmm.hf.loading.pretrained import find_target, load_target
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.messages import Chat, as_parts, joined, written
from specmm.hf.prompts.options import CallOptions, Options, lists_options
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.zoo import Source


@dataclass(kw_only=True)
class TextOutput(Answered):
    """``texts`` [B] after the prompts; DiffuSpec adds the ``trace`` of each row's controller:
    (drafted, accepted) by round.
    """

    texts: list[str]
    trace: list[list[tuple[int, int]]] = field(default_factory=list)


class TextPipeline(Pipeline):
    """A causal language model, its tokenizer and its drafters.

    Several threads may share one: calls are answered in order of arrival, and streams take turns
    round by round.

    >>> pipe = TextPipeline.from_pretrained("pocket/coder", method="deer")
    >>> pipe("def add(a, b):", max_new_tokens=64).texts
    """

    registry = methods.TEXT
    method: methods.TextMethod
    usual: ClassVar[dict[str, Any]] = {"chat": False}

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        method: str | methods.TextMethod = "ar",
        drafter: object = None,
        folder: Path | None = None,
        name: str = "text",
    ) -> None:
        super().__init__(model, tokenizer, method, drafter, folder, name)
        self.works = Works("text")

    @classmethod
    def _folder_of(cls, name: str | Path, source: Source) -> Path:
        return find_target(name, source=source)

    @classmethod
    def _loaded(cls, folder: Path, placing: Placing) -> tuple[Any, Any]:
        load = partial(_load, folder, **placing.options)
        loaded: tuple[Any, Any] = placing.loaded(load, itemgetter(0))
        return loaded

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """See :class:`Pipeline`; rounds are compiled again."""
        self.works.clear()
        return super().to(*args, **kwargs)

    @in_its_turn(lambda pipe: pipe.model)
    @lists_options(chat=False)
    def __call__(
        self,
        prompts: str | Sequence[str] | None = None,
        streamer: BaseStreamer | None = None,
        **options: Unpack[CallOptions],
    ) -> TextOutput:
        """Continue one prompt or a batch of them, whatever their lengths, or ``messages``.

        ``options``: see :class:`specmm.hf.prompts.options.Options`; ``chat`` is off by default. A
        text depends on its own random stream, not on the batch (though auto chooses for the batch).
        ``streamer`` gets a single text's ids, but not the prompt's: leave its ``skip_prompt`` off.
        Raises ``ValueError`` for prompts, options and methods that do not fit.
        """
        with ending(streamer):
            settings = self.options(options)
            work = self._work(prompts, settings)
            if work is not None:
                settings = replace(settings, compiled=self._pays(work, prompts, settings))
            start = time.perf_counter()
            run = self._start(settings, prompts)
            texts, tokens, end = run.finish(streamer)
            output = run.told(tokens, end)
            if work is not None:
                count = max(sum(map(len, tokens)), 1)
                work.observe(time.perf_counter() - start, count, output["compiled"], run.built)
        drafter = getattr(run.drafter, "inner", run.drafter)  # a grammar's drafter wraps it
        trace = [row.trace for row in getattr(drafter, "rows", []) if hasattr(row, "trace")]
        return TextOutput(texts=texts, trace=trace, **output)

    @lists_options(chat=False)
    def stream(
        self, prompts: str | Sequence[str] | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[list[str]]:
        """The new text of every row after each round; options as for a call."""
        for rows in self.rounds(prompts, apart=False, **options):
            yield [row.text for row in rows]

    @lists_options(chat=False)
    def rounds(
        self,
        prompts: str | Sequence[str] | None = None,
        apart: bool = True,
        **options: Unpack[CallOptions],
    ) -> Iterator[list[RoundText]]:
        """As ``stream``, with token counts; accepted drafts are separate pieces if ``apart``."""

        def found() -> Iterator[list[RoundText]]:  # all of it in its turn
            yield from self._start(self.options(options), prompts).rounds(apart)

        yield from turns_of(self.model).each(found())

    @in_its_turn(lambda pipe: pipe.model)
    def planned(self, prompts: str | Sequence[str] | None = None, **options: Any) -> str:
        """The method that ``auto`` chooses for ``prompts`` after it has tried all on whole answers,
        and why; ``records`` holds the measurements.
        """
        settings = self.options({**options, "method": methods.Auto()})
        return self._start(settings, prompts, share=math.inf).method

    def prepared(
        self, prompts: str | Sequence[str] | None = None, **options: Any
    ) -> tuple[VLMTarget, VLMPrompt]:
        """The model as a target for ``prompts``, and the prompts as one batch of its inputs."""
        return self._prepared(self.options(options), prompts)

    @in_its_turn(lambda pipe: pipe.model)
    def begin(self, prompts: str | Sequence[str] | None = None, **options: Any) -> Run:
        """A run before its first round, for callers that run its rounds one by one."""
        return self._start(self.options(options), prompts)

    def encode(self, prompts: str | Sequence[str], chat: bool = False) -> list[list[int]]:
        """Ids of each prompt, with ``chat`` in the model's template; raises for empty ones."""
        texts = texts_of("prompt", prompts)
        if not texts or not all(texts):
            raise ValueError("prompt must not be empty, got nothing to continue; give some text")
        if not chat:
            return [self._raw(text) for text in texts]
        return [self._marked(self.templated(text)) for text in texts]

    def prompt(self, asked: Any, options: Options) -> VLMPrompt:
        return VLMPrompt({**padded(asked)}, options.max_new_tokens)

    def asked(
        self, options: Options, prompts: Any, images: None = None, videos: None = None
    ) -> list[list[int]]:
        """Ids of each prompt, or of each chat of the ``options``."""
        if options.fps is not None:
            raise ValueError("fps is for videos, which only VQAPipeline takes; leave it out")
        if options.messages is None:
            return self.encode(prompts or [], options.chat)
        if prompts is not None:
            raise ValueError("give prompts or messages, got both")
        if any(chat.images or chat.videos for chat in options.messages):
            raise ValueError(
                "messages must hold only text, got pictures or videos; use VQAPipeline (specmm ask)"
            )
        return [self._marked(self._templated(chat)) for chat in options.messages]

    def _rows(self, prompts: str | Sequence[str] | None, options: Options) -> int:
        """The number of texts of a call."""
        return len(options.messages or texts_of("prompt", prompts))

    def _marked(self, text: str) -> list[int]:
        """Ids of ``text``, which contains its special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _raw(self, text: str) -> list[int]:
        """Ids of ``text``, without a second beginning-of-text token if it already has one, as the
        output of a chat template may.
        """
        mark = self.tokenizer.bos_token
        marked = bool(mark) and text.startswith(str(mark))
        ids: list[int] = self.tokenizer(text, add_special_tokens=not marked)["input_ids"]
        return ids

    def templated(self, question: str) -> str:
        """``question`` in the model's chat template; raises ``ValueError`` if it has none."""
        return self._templated(Chat.of([{"role": "user", "content": question}]))

    def _templated(self, chat: Chat) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.name} must have a chat template for chat, got none; give a prompt that it "
                "continues, to a server at /v1/completions"
            )
        write = partial(
            self.tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False
        )
        return written(chat, write, (joined, as_parts))

    def _work(self, prompts: str | Sequence[str] | None, options: Options) -> Work | None:
        """The timing record of such calls, if it decides whether they are compiled."""
        if options.compiled != "auto" or self.captures(options):
            return None  # a graph pays within a few rounds
        method = options.chosen(methods.TEXT, self.method)
        rows = self._rows(prompts, options)
        common = (options.batch_size, bool(options.stops))
        key = (method, options.processor, rows, room(options.max_new_tokens), *common)
        return self.works.of(self.model, key)

    def _pays(self, work: Work, prompts: str | Sequence[str] | None, options: Options) -> bool:
        """Whether compiling the call pays and is possible."""
        tokens = options.max_new_tokens * self._rows(prompts, options)
        method = options.chosen(methods.TEXT, self.method)
        quick = replace(options, compiled=True)

        def make() -> SharedRounds:
            return self.rounds_of(method, self.target(method, options), quick)

        return work.programs(tokens, make) is not None


def _load(folder: Path, dtype: Any = None, **options: Any) -> tuple[Any, Any]:
    """The model in ``folder`` and its tokenizer; vision-language models answer without pictures."""
    try:
        return load_target(folder, dtype, **options)
    except ValueError:
        if not sees(ModelFolder(folder)):
            raise
    model = named("specmm.vlm.loading:load_model")(folder, dtype, **options)
    return model, named("specmm.vlm.loading:load_processor")(folder).tokenizer
