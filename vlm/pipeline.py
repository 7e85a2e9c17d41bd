"""``VQAPipeline``: answers about pictures from a vision-language model of transformers.

Shape letters: B questions of a batch, T tokens of an answer.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from PIL import Image
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from specmm import methods
from specmm.choose.contest import SHARE
from specmm.core.stats import Certificate, Stats
from specmm.core.turns import in_its_turn, turns_of
from specmm.extending.registry import named
from specmm.hf.answers.choosing_drawn import DrawnAnswers
from specmm.hf.answers.run import Answered, Chosen, RoundText, Run, ending, stream
from specmm.hf.answers.running import Pipeline
from specmm.hf.drafters.drafting import KINDS
from specmm.hf.loading.placing import Placing
from specmm.hf.loading.pretrained import find
from specmm.hf.models.target import VLMTarget
from specmm.hf.pictures.interleaved import SERVING, InterleavedTarget, PictureReader
from specmm.hf.prompts.options import CallOptions, Options, lists_options
from specmm.hf.prompts.prompt import VLMPrompt
from specmm.hf.prompts.stop_strings import Ids, StopStrings
from specmm.programs.compiled import NotCompiled
from specmm.vlm import wording
from specmm.vlm.asking import Images, Questions, Texts, Videos
from specmm.vlm.loading import is_composed, load_model, load_processor
from specmm.zoo import Source


@dataclass(kw_only=True)
class VQAOutput(Answered):
    """``answers`` [B]; for Speculative Verdict also the ``ruling``: all answers, and the experts
    chosen. ``pictures`` [B]: the pictures in each answer, whose text has a placeholder for each.
    """

    answers: list[str]
    ruling: Any = None
    pictures: list[list[Image.Image]] = field(default_factory=list)


class VQAPipeline(Pipeline):
    """A vision-language model, its processor and its drafters.

    Several threads may share one: calls are answered in the order they arrive, and streams take
    turns round by round.

    >>> pipe = VQAPipeline.from_pretrained("pocket/llava", method="msd")
    >>> pipe("street.png", "How many bags are there?", max_new_tokens=64).answers
    """

    registry = methods.VQA
    method: methods.VQAMethod

    def __init__(
        self,
        model: Any,
        processor: Any,
        method: str | methods.VQAMethod = "ar",
        drafter: Any = None,
        folder: Path | None = None,
        name: str = "vlm",
    ) -> None:
        super().__init__(model, processor.tokenizer, method, drafter, folder, name)
        self.processor = processor
        wording.warn_of_none(processor, name)
        self.drawn = DrawnAnswers()

    @classmethod
    def _folder_of(cls, name: str | Path, source: Source) -> Path:
        return find(name, source=source, kind="questions")

    @classmethod
    def _loaded(cls, folder: Path, placing: Placing) -> tuple[Any, Any]:
        load = partial(load_model, folder, **placing.options)
        return placing.loaded(load), load_processor(folder)

    @property
    def reader(self) -> Any:
        """The processor."""
        return self.processor

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """See :class:`Pipeline`; the decoder of pictures is reloaded on the model's device."""
        self.__dict__.pop("_reader", None)
        self.drawn.records.clear()
        return super().to(*args, **kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """See :class:`Pipeline`; the folder of a composed model is copied."""
        composed = self.drafters.folder
        if composed is not None and is_composed(composed):
            shutil.copytree(composed, folder, dirs_exist_ok=True)
        else:
            super().save_pretrained(folder)

    @in_its_turn(lambda pipe: pipe.model)
    @lists_options()
    def __call__(
        self,
        images: Images = None,
        questions: Texts | None = None,
        streamer: BaseStreamer | None = None,
        videos: Videos = None,
        **options: Unpack[CallOptions],
    ) -> VQAOutput:
        """Answer one question about one picture, several or none, or a list of questions with a
        list of such ``images``. ``videos`` are given in the same way, to models that accept them:
        files, folders or lists of frames, arrays [F, H, W, 3]. A picture is a file, an address, a
        PIL image, an array or a tensor (see :func:`specmm.vlm.pictures.open_image`). ``messages``
        replace all of these.

        ``options``: see :class:`Options`. An answer depends on its own random stream, not on the
        batch (though auto chooses for the batch). ``streamer`` gets a single answer's ids, but not
        the prompt's: leave its ``skip_prompt`` off. Raises ``ValueError`` for pictures, questions,
        options and methods that do not fit.
        """
        with ending(streamer):
            settings = self.options(options)
            method = self._method(settings)
            if _is_judged(method):
                if videos is not None:
                    raise ValueError(
                        f"method {method.name!r} takes only pictures, got videos; choose another "
                        "method"
                    )
                judged = self._judge(method, images, questions, options, streamer)
                judged.certificate = judged.certificate.under(settings.processor.settings)
                return judged
            run = self._start(settings, questions, images, videos)
            answers, tokens, end = run.finish(streamer)
        texts = [answer.strip() for answer in answers]
        output = VQAOutput(answers=texts, **run.told(tokens, end))
        if settings.draw:
            output.pictures = self._reader.pictures([ids.tolist() for ids in tokens])
            self.drawn.observe(tokens, self._reader.grammar)
        return output

    @lists_options()
    def stream(
        self,
        images: Images = None,
        questions: Texts | None = None,
        videos: Videos = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[list[str]]:
        """The new text of every answer after each round; options as for a call."""
        settings = self.options(options)
        if _is_judged(self._method(settings)):
            raise ValueError(
                "method 'verdict' cannot stream, because its answer comes after all models have "
                "answered; call the pipeline instead"
            )
        rounds = self._rounds(False, settings, questions, images, videos)
        for round_ in turns_of(self.model).each(rounds):
            yield [piece.text for piece in round_]

    @lists_options()
    def rounds(
        self,
        images: Images = None,
        questions: Texts | None = None,
        videos: Videos = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[list[RoundText]]:
        """As ``stream``, with token counts; accepted drafts are separate pieces if ``apart``."""
        rounds = self._rounds(True, self.options(options), questions, images, videos)
        yield from turns_of(self.model).each(rounds)

    @in_its_turn(lambda pipe: pipe.model)
    def planned(self, images: Images = None, questions: Texts | None = None, **options: Any) -> str:
        """The method that ``auto`` chooses for ``questions`` after it has tried all on whole
        answers, and why; ``records`` holds the measurements.
        """
        settings = self.options({**options, "method": methods.Auto()})
        return self._start(settings, questions, images, share=math.inf).method

    def prepared(
        self, images: Images = None, questions: Texts | None = None, **options: Any
    ) -> tuple[VLMTarget, VLMPrompt]:
        """The model as a target for ``questions``, and the questions as one batch of its inputs."""
        return self._prepared(self.options(options), questions, images)

    def prompt(self, asked: Any, options: Options) -> VLMPrompt:
        """The model's inputs for the questions ``asked``."""
        return VLMPrompt(asked.inputs(self.processor), options.max_new_tokens, asked)

    def asked(
        self, options: Options, prompts: Texts | None, images: Images = None, videos: Videos = None
    ) -> Questions:
        """The questions of a call, or the chats in its ``options``."""
        if options.messages is None:
            questions = Questions.of(images, prompts, options.chat, videos, options.fps)
        elif images is None and prompts is None and videos is None:
            questions = Questions.of_chats(options.messages, options.fps)
        else:
            raise ValueError("give messages, or questions with their pictures and videos, got both")
        if options.fps is not None and not any(questions.videos):
            raise ValueError("fps is for videos given as frames, got none; leave it out")
        return questions

    @in_its_turn(lambda pipe: pipe.model)
    def begin(
        self,
        images: Images = None,
        questions: Texts | None = None,
        videos: Videos = None,
        **options: Any,
    ) -> Run:
        """A run before its first round, for callers that run its rounds one by one."""
        return self._start(self.options(options), questions, images, videos)

    def _rounds(self, apart: bool, *asked: Any) -> Iterator[list[RoundText]]:
        yield from self._start(*asked).rounds(apart)

    def _method(self, options: Options) -> methods.VQAMethod:
        method: methods.VQAMethod = options.chosen(methods.VQA, self.method)
        return method

    def _judge(
        self,
        method: Any,
        images: Images,
        question: Texts | None,
        options: Mapping[str, Any],
        streamer: BaseStreamer | None,
    ) -> VQAOutput:
        """Speculative Verdict: this pipeline's experts answer, and its model is the judge."""
        if not isinstance(question, str):
            got = "messages" if question is None else len(question)
            raise ValueError(f"method 'verdict' takes one question at a time, got {got}")
        judge = VQAPipeline(self.model, self.processor, name=self.name)
        experts = self.drafter(method.name)
        call_options = {name: value for name, value in options.items() if name != "method"}
        if call_options.get("seed", 0) is None:
            del call_options["seed"]
        begin = time.perf_counter()
        decide = named(KINDS[method.name].judge)(experts, judge, method.keep)
        ruling = decide(images, question, **call_options)
        ids = torch.tensor(self.tokenizer.encode(ruling.answer, add_special_tokens=False))
        if streamer is not None:  # nothing to stream before the experts have answered
            stream(streamer, [ids])
        stats = Stats(tokens=len(ids), rounds=len(ids), seconds=time.perf_counter() - begin)
        reason = "the answer is the verdict model's after it has read those of the others"
        claim = Certificate("heuristic", reason)
        output: dict[str, Any] = dict(tokens=[ids], stats=stats, certificate=claim)
        return VQAOutput(answers=[ruling.answer], method=method.name, ruling=ruling, **output)

    def chosen(
        self, method: Any, target: VLMTarget, prompt: VLMPrompt, share: float = SHARE
    ) -> Chosen:
        """See :class:`Pipeline`; for answers with pictures ``auto`` tries methods for these."""
        if method.name != methods.Auto.name or not isinstance(target, InterleavedTarget):
            return super().chosen(method, target, prompt, share)
        choice, why = self.drawn.chosen(target, prompt)
        return Chosen(choice, f"auto: {methods.label(choice)} ({why})")

    def check_drawing(self, method: methods.VQAMethod, max_new_tokens: int) -> None:
        """Raise ``ValueError`` unless answers of ``max_new_tokens`` by ``method`` can hold pictures
        and the pictures can be decoded.
        """
        _check_serving(method)
        self._reader.check(max_new_tokens)

    def target(self, method: Any, options: Options) -> VLMTarget:
        """See :class:`Pipeline`; raises ``ValueError`` for pictures by methods without support."""
        if not options.draw:
            return super().target(method, options)
        if options.compiled is True:
            raise NotCompiled("compiled=True does not serve answers with pictures; leave draw out")
        _check_serving(method)
        return InterleavedTarget(self.model, options.processor, self.name)

    def stops(self, options: Options) -> StopStrings:
        """See :class:`Pipeline`; each drawn picture appears as the processor's placeholder."""
        if not options.draw:
            return super().stops(dataclasses.replace(options, chat=True))  # prompts end in a mark
        placeholder = str(getattr(self.processor, "image_token", "<image>"))

        def text(ids: Ids) -> str:
            listed = ids.tolist() if isinstance(ids, Tensor) else ids
            return self._reader.text(listed, self.text, placeholder)

        return StopStrings(options.stops, text, text)

    @cached_property
    def _reader(self) -> PictureReader:
        """The reader that finds pictures in answers."""
        return PictureReader(self.model, self.drafters.folder or Path(self.name), self.name)


def _check_serving(method: methods.VQAMethod) -> None:
    """Raise ``ValueError`` for a method that cannot put pictures into answers."""
    if method.name not in SERVING:
        raise ValueError(f"draw=True needs a method of {', '.join(SERVING)}, got {method.name!r}")


def _is_judged(method: methods.VQAMethod) -> bool:
    """Whether the method has a judge that chooses among answers, instead of a drafter."""
    return method.name in KINDS and bool(KINDS[method.name].judge)
