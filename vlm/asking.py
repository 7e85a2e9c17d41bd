"""Turns pictures, videos and questions into a model's inputs: opens, processes and pads them.

Shape letters: B batch, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from specmm.extending.kinds import texts_of
from specmm.hf.prompts.messages import Chat
from specmm.vlm import wording
from specmm.vlm.pictures import Source, open_image
from specmm.vlm.videos import Video, VideoSource, is_video, open_video

Pictures = Source | Sequence[Source] | None  # of one question
Images = Pictures | Sequence[Pictures]
Clips = VideoSource | Sequence[VideoSource] | None  # of one question
Videos = Clips | Sequence[Clips]
Texts = str | Sequence[str]


@dataclass(frozen=True)
class Questions:
    """B questions or chats with their pictures and videos; not ``chat``: they hold placeholders."""

    texts: Sequence[str | Chat]
    pictures: list[list[Image.Image]]
    videos: list[list[Video]]
    chat: bool = True

    @classmethod
    def of(
        cls,
        images: Images,
        questions: Texts | None,
        chat: bool = True,
        videos: Videos = None,
        fps: float | None = None,
    ) -> Questions:
        """Check the arguments of a call and open its pictures and videos.

        One question takes one picture, a list of pictures (or an array [N, ...]), or None, and
        likewise videos (a list of pictures is one video, of ``fps`` frames a second). A list of
        questions takes a list with such an entry for each. Raises ``ValueError`` for an empty
        question and for numbers that do not match.
        """
        texts = texts_of("question", questions)
        if not texts or not all(text.strip() for text in texts):
            raise ValueError("question must not be empty")
        single = isinstance(questions, str)
        images = _as_list(images)
        pictures = [images] if single else _per_question("images", "picture", images, len(texts))
        clips = [videos] if single else _per_question("videos", "video", videos, len(texts))
        return cls(
            texts,
            [
                _each(item, lambda value: not isinstance(value, list | tuple), open_image)
                for item in pictures
            ],
            [_each(item, is_video, partial(open_video, fps=fps)) for item in clips],
            chat,
        )

    @classmethod
    def of_chats(cls, chats: Sequence[Chat], fps: float | None = None) -> Questions:
        """The questions of ``chats``, with pictures and videos opened; ``fps`` is the rate of
        frames for which a chat gives none.
        """
        pictures = [[open_image(source) for source in chat.images] for chat in chats]
        videos = [
            [
                source
                if isinstance(source, Video)
                else open_video(source, fps if rate is None else rate)
                for source, rate in zip(chat.videos, chat.rates, strict=True)
            ]
            for chat in chats
        ]
        return cls(chats, pictures, videos)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, some: slice) -> Questions:
        return Questions(self.texts[some], self.pictures[some], self.videos[some], self.chat)

    def inputs(self, processor: Any) -> dict[str, Any]:
        """The output of ``processor`` for the questions: ``input_ids`` [B, L] and the rest, as
        tensors.

        Raises ``ValueError`` for inputs that the processor does not accept.
        """
        rows = zip(self.texts, self.pictures, self.videos, strict=True)
        prompts = [
            wording.conversation(processor, text)
            if isinstance(text, Chat)
            else wording.prompt(
                processor, text, {"image": len(pictures), "video": len(clips)}, self.chat
            )
            for text, pictures, clips in rows
        ]
        return wording.read(processor, prompts, self.pictures, self.videos)


def _as_list(images: Any) -> Any:
    """Pictures of one array or tensor [N, ...] as a list of them."""
    stacked = isinstance(images, np.ndarray | Tensor) and images.ndim == 4
    return list(images) if stacked else images


def _each(media: Any, is_one: Callable[[Any], bool], opened: Callable[[Any], Any]) -> list[Any]:
    """The pictures or videos ``media`` of one question (none, one or several), opened."""
    if media is None:
        return []
    return [opened(item) for item in ([media] if is_one(media) else media)]


def _per_question(name: str, one: str, media: Any, count: int) -> list[Any]:
    """``media`` as a list with one entry for each of ``count`` questions."""
    entries = [None] * count if media is None else media
    if not isinstance(entries, list | tuple) or len(entries) != count:
        got = len(entries) if isinstance(entries, list | tuple) else f"one {one}"
        raise ValueError(
            f"{name} must be a list with an entry for each of the {count} questions, got {got}"
        )
    return list(entries)
