"""Conversations as token rows: one after the other as a chat, or side by side after one picture.

Side by side, each question is a segment that sees the picture and itself only, at the positions it
would have alone: the row trains many one-question conversations for the price of one picture.

Shape letters: B rows, L tokens, N image tokens, P tokens before the first question, R pixels a
side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipes.scenes.questions import Turn
from recipes.scenes.sprites import Array
from recipes.scenes.tokenizer import ASSISTANT, BOS, EOS, IMAGE, MEAN, STD, USER
from specmm.hf.prompts.prompt import VLMPrompt


@dataclass(frozen=True)
class Sample:
    """One row. ``answer_mask`` marks the tokens of answers, each answer's end of sequence included.

    Tokens of segment 0 are seen by all later ones, others by their own segment only; a chat is all
    0.
    """

    input_ids: Tensor  # [L]
    pixel_values: Tensor | None  # [3, R, R]
    answer_mask: Tensor  # [L] bool
    segments: Tensor  # [L]
    position_ids: Tensor  # [L]

    @property
    def said(self) -> bytes:
        """What it says."""
        return self.input_ids.numpy().tobytes()


def collate(chats: Sequence[Sample]) -> tuple[VLMPrompt, Tensor]:
    """A prompt of whole ``chats``, padded at the right, and their answer masks [B, L]."""
    ids = pad_sequence([chat.input_ids for chat in chats], batch_first=True)
    answers = pad_sequence([chat.answer_mask for chat in chats], batch_first=True)
    lengths = torch.tensor([len(chat.input_ids) for chat in chats])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    found = {"input_ids": ids, "attention_mask": mask}
    pictures = [chat.pixel_values for chat in chats if chat.pixel_values is not None]
    if pictures:
        found["pixel_values"] = torch.stack(pictures)
    return VLMPrompt(found, 1), answers


@dataclass(frozen=True)
class Batch:
    """Rows of the same length, pictures in all of them or in none."""

    input_ids: Tensor  # [B, L]
    pixel_values: Tensor | None  # [B, 3, R, R]
    answer_mask: Tensor  # [B, L] bool
    segments: Tensor  # [B, L]
    position_ids: Tensor  # [B, L]

    @property
    def attention_mask(self) -> Tensor:
        """Who sees whom, [B, 1, L, L] bool."""
        seen = (self.segments[:, None] == 0) | (self.segments[:, None] == self.segments[..., None])
        return (seen & torch.ones_like(seen[0]).tril())[:, None]

    @property
    def labels(self) -> Tensor:
        """The token to predict at each place, −100 where none is asked for, [B, L]."""
        targets = self.input_ids.masked_fill(~self.answer_mask, -100)
        return torch.nn.functional.pad(targets[:, 1:], (0, 1), value=-100)


@dataclass(frozen=True)
class Marks:
    """What stands around questions and answers: before the picture, before each later question,
    between a question and its answer, after the answer; and the picture's own placeholder.
    """

    opening: str = BOS + USER
    again: str = USER
    reply: str = ASSISTANT
    end: str = EOS
    image: str = IMAGE


class Encoder:
    """Turns conversations into samples for a tokenizer and a number of image tokens.

    ``marks`` are those of the model's chat template; ``pixels`` makes of a picture [R, R, 3] what
    the tower sees.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_tokens: int,
        marks: Marks = Marks(),
        pixels: Callable[[Array], Tensor] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_tokens = image_tokens
        self.pixels = pixels or to_pixels
        self.bos = tokenizer.bos_token_id
        self.eos = tokenizer.eos_token_id
        self.pad = tokenizer.pad_token_id
        self.image: int = tokenizer.convert_tokens_to_ids(marks.image)
        self.opening, self.again, self.reply, self.end = (
            tokenizer.encode(mark, add_special_tokens=False)
            for mark in (marks.opening, marks.again, marks.reply, marks.end)
        )
        self._known: dict[str, list[int]] = {}

    def prefix(self, visual: bool) -> list[int]:
        """The P tokens before the first question."""
        return [*self.opening, *[self.image] * (self.image_tokens if visual else 0)]

    def chat(
        self, turns: Sequence[Turn], image: Array | None = None, length: int | None = None
    ) -> Sample:
        """Turns one after the other, cut and padded to ``length`` tokens where it is given."""
        return self._pack(turns, image, length, side_by_side=False)

    def side_by_side(self, turns: Sequence[Turn], image: Array | None, length: int) -> Sample:
        """As many of ``turns`` as fit into ``length`` tokens, each as if it were alone."""
        return self._pack(turns, image, length, side_by_side=True)

    def _pack(
        self, turns: Sequence[Turn], image: Array | None, length: int | None, *, side_by_side: bool
    ) -> Sample:
        ids = self.prefix(image is not None)
        start = len(ids)
        answers = [False] * start
        segments = [0] * start
        positions = list(range(start))
        for i, turn in enumerate(turns):
            question = [*self._encode(turn.question), *self.reply]
            answer = [*self._encode(turn.answer), *self.end]
            if not side_by_side and i:
                question = [*self.again, *question]
            new = question + answer
            if length is not None and len(ids) + len(new) > length:
                continue
            ids += new
            answers += [False] * len(question) + [True] * len(answer)
            segments += [(i + 1) * side_by_side] * len(new)
            first = start if side_by_side else positions[-1] + 1
            positions += range(first, first + len(new))
        missing = max((length or 0) - len(ids), 0)
        return Sample(
            torch.tensor(ids + [self.pad] * missing),
            None if image is None else self.pixels(image),
            torch.tensor(answers + [False] * missing),
            torch.tensor(segments + [len(turns) + 1] * missing),
            torch.tensor(positions + [0] * missing),
        )

    def _encode(self, text: str) -> list[int]:
        if text not in self._known:
            if len(self._known) > 50_000:
                self._known.clear()
            self._known[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._known[text]


def to_pixels(image: Array) -> Tensor:
    """A picture [R, R, 3] uint8 as the processor prepares it, [3, R, R]."""
    return (
        torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        .float()
        .div(255)
        .sub(MEAN)
        .div(STD)
    )


def stack(samples: Sequence[Sample]) -> Batch:
    """Samples of one length as a batch."""
    pixels = [s.pixel_values for s in samples if s.pixel_values is not None]
    return Batch(
        torch.stack([s.input_ids for s in samples]),
        torch.stack(pixels) if pixels else None,
        torch.stack([s.answer_mask for s in samples]),
        torch.stack([s.segments for s in samples]),
        torch.stack([s.position_ids for s in samples]),
    )
