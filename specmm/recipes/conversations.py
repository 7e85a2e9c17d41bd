"""Conversations of your own for an MSD drafter: lines of JSON, read through the model's own
processor.

A line holds ``question``, ``answer`` and, where there is one, ``image``: a file, relative to the
lines'.

Shape letters: L tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from specmm.recipes.training.msd import Example
from specmm.vlm.asking import Questions

HELD_OUT = 10  # one line with a picture of so many is not trained on
PER_TOKEN = (
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
)  # which the target makes by itself


@dataclass(frozen=True)
class Conversations:
    """``draw`` gives examples to train on; ``questions`` are some that were held out, to measure
    acceptance on.
    """

    draw: Callable[[Random, bool], Example]
    questions: Callable[[int], Questions]


@dataclass(frozen=True)
class Line:
    """A question with its answer, ``image`` empty where it has none."""

    question: str
    answer: str
    image: str = ""

    def asked(self) -> Questions:
        """The question with its picture opened."""
        return Questions.of(self.image or None, self.question)


def conversations(place: str, target: Any, processor: Any) -> Conversations:
    """Those in the file ``place``. Without a line of the wanted sort (with a picture or none) the
    other is drawn.

    Raises ``ValueError`` for a line that is none, and where no line with a picture is left to train
    on.
    """
    lines = _lines(Path(place).expanduser())
    visual, text = (
        [line for line in lines if line.image],
        [line for line in lines if not line.image],
    )
    held_out, learnt = visual[::HELD_OUT], [line for i, line in enumerate(visual) if i % HELD_OUT]
    if not learnt:
        raise ValueError(
            f"data must hold two or more lines with an image, got {len(visual)} in {place}"
        )

    def draw(random: Random, wanted: bool) -> Example:
        return example(random.choice(learnt if wanted or not text else text), processor)

    def questions(count: int) -> Questions:
        some = held_out[:count]
        return Questions.of([line.image for line in some], [line.question for line in some])

    return Conversations(draw, questions)


def example(line: Line, processor: Any) -> Example:
    """``line`` as the model reads it: its question in the chat template, then the answer and its
    end.
    """
    inputs = line.asked().inputs(processor)
    words = processor.tokenizer
    answer = [*words.encode(line.answer, add_special_tokens=False), words.eos_token_id]
    asked = inputs.pop("input_ids")[0]
    mask = torch.arange(len(asked) + len(answer)) >= len(asked)
    vision = {name: value for name, value in inputs.items() if name not in PER_TOKEN}
    return Example(torch.cat([asked, torch.tensor(answer)]), mask, vision)


def _lines(file: Path) -> list[Line]:
    found = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(text)
            line = Line(
                row["question"],
                row["answer"],
                str(file.parent / row["image"]) if row.get("image") else "",
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}:{number} must hold question and answer, got {text[:60]!r}"
            ) from error
        found.append(line)
    return found
