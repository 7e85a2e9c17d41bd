"""Conversations of your own for an MSD drafter: lines of JSON, read through the model's own
processor as a pipeline reads questions.

A line holds ``question``, ``answer`` and, where there are any, ``image`` and ``video``: a file,
relative to the lines', or a list of them.

Shape letters: B lines of a batch, L tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from specmm.hf.prompt import VLMPrompt
from specmm.hf.target import VLMTarget
from specmm.recipes.training.msd import Read, answered, collate
from specmm.vlm.asking import Clips, Pictures, Questions
from specmm.vlm.pipeline import VQAPipeline
from specmm.vlm.wording import FAULTS

HELD_OUT = 10  # one line with a picture of so many is not trained on
QUESTION = "Question"  # words of a talk that shows what the template puts after an answer
ANSWER = "Answer"


@dataclass(frozen=True)
class Conversations:
    """``draw`` gives what to train on, ``read`` makes a batch of it; ``questions`` are some that
    were held out, to measure acceptance on.
    """

    draw: Callable[[Random, bool], Any]
    questions: Callable[[int], Questions]
    read: Read = collate


@dataclass(frozen=True)
class Line:
    """A question with its answer, its pictures and its videos."""

    question: str
    answer: str
    images: Pictures = None
    videos: Clips = None

    @property
    def visual(self) -> bool:
        """Whether there is anything to see."""
        return bool(self.images or self.videos)


def conversations(place: str, target: VLMTarget, processor: Any) -> Conversations:
    """Those in the file ``place``. Without a line of the wanted sort (with a picture or none) the
    other is drawn.

    Raises ``ValueError`` for a line that is none, and where no line with a picture is left to train
    on.
    """
    lines = _lines(Path(place).expanduser())
    visual = [line for line in lines if line.visual]
    text = [line for line in lines if not line.visual]
    held_out = visual[::HELD_OUT]
    learnt = [line for i, line in enumerate(visual) if i % HELD_OUT]
    if not learnt:
        raise ValueError(
            f"data must hold two or more lines with an image or a video, got {len(visual)} in "
            f"{place}"
        )

    def draw(random: Random, wanted: bool) -> Line:
        return random.choice(learnt if wanted or not text else text)

    def questions(count: int) -> Questions:
        return _asked(held_out[:count])

    return Conversations(draw, questions, reader(processor, target))


def reader(processor: Any, target: VLMTarget) -> Read:
    """What makes batches of lines for ``target``."""
    ends = VQAPipeline(target.model, processor).ends()
    return partial(read_lines, processor, answer_end(processor, ends))


def read_lines(processor: Any, end: int, lines: Sequence[Line]) -> tuple[VLMPrompt, Tensor]:
    """``lines`` as the model reads them: questions in the chat template with all that goes with
    their pictures, then each answer and its ``end``; and which tokens are answers' [B, L].
    """
    words = processor.tokenizer
    answers = [words.encode(line.answer, add_special_tokens=False) for line in lines]
    prompt = VLMPrompt(_asked(lines).inputs(processor), 1)
    return answered(prompt, [[*answer, end] for answer in answers])


def answer_end(processor: Any, ends: Sequence[int]) -> int:
    """The token that ends an answer: the first of ``ends`` after one in the chat template.

    Where there is none it is the tokenizer's end of sequence.
    """
    words = processor.tokenizer
    talk = zip(("user", "assistant"), (QUESTION, ANSWER), strict=True)
    said = [{"role": r, "content": [{"type": "text", "text": text}]} for r, text in talk]
    after = ""
    with suppress(TemplateError, *FAULTS):  # it has no template, or one for other talks
        after = str(processor.apply_chat_template(said, tokenize=False)).rpartition(ANSWER)[2]
    last = words.eos_token_id
    tokens = [*words.encode(after, add_special_tokens=False), last]
    return int(next((token for token in tokens if token in ends), last))


def _asked(lines: Sequence[Line]) -> Questions:
    return Questions.of(
        [line.images for line in lines],
        [line.question for line in lines],
        videos=[line.videos for line in lines],
    )


def _lines(file: Path) -> list[Line]:
    found = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(text)
            shown = (_files(file.parent, row.get(name)) for name in ("image", "video"))
            line = Line(row["question"], row["answer"], *shown)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}:{number} must hold question and answer, got {text[:60]!r}"
            ) from error
        found.append(line)
    return found


def _files(folder: Path, named: str | list[str] | None) -> list[str]:
    """The files that a line names, beside it."""
    names = [named] if isinstance(named, str) else named or []
    return [str(folder / name) for name in names if name]
