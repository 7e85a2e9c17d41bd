"""The data of drafters' trainings, as recipes' settings name them: chats, texts, or texts and chats
that the target makes up.

Shape letters: R rows, L tokens of a row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmm.chats.tokens import ChatReader
from specmm.extending.registry import unknown
from specmm.hf.loading.pretrained import find_target, load_config, load_tokenizer, weights_folder
from specmm.hf.models.families import room_of
from specmm.hf.models.target import VLMTarget
from specmm.hf.prompts.prompt import VLMPrompt, padded
from specmm.loading.checkpoints import read_json
from specmm.recipes.answers import answered
from specmm.recipes.conversations import LONGEST, Conversations, Opening, Spool
from specmm.recipes.loop import one_first
from specmm.recipes.recipe import Count, Places, Share
from specmm.recipes.settings import Begun, Lessons, sees
from specmm.recipes.training.drawn_rows import drawn_chats, drawn_rows
from specmm.recipes.training.small_qwen import LENGTH
from specmm.recipes.training.texts import Rows, split, text_stream, windows
from specmm.vlm.loading import is_composed, load_processor

TOO_LONG = ("skip", "cut")
TEXT_ROWS = 1536  # the default number of rows
PROMPT = 64  # tokens of a text's beginning that is continued to measure acceptance


@dataclass(frozen=True)
class Data:
    """Settings for chats: their files or folders, and how they are read."""

    data: Places
    held_out: Share
    max_length: Count | None
    too_long: str
    thinking: bool | None

    def opened(
        self,
        folder: Path,
        load: Callable[[], VLMTarget],
        out: Path,
        seed: int,
        unanswered: bool = False,
    ) -> Conversations:
        """The chats for the model in ``folder``, which ``load`` loads if needed; with
        ``unanswered`` the model fills in empty answers.

        Raises ``ValueError`` if no chat can be used.
        """
        if not self.data.places:
            raise ValueError("data must be files or folders of chats, got none; give data=FILE")
        opening = Opening(self.reader(folder), load, out, self.held_out, seed, unanswered)
        opened: Conversations = self.data(opening)
        return opened

    def reader(self, folder: Path) -> ChatReader:
        """The reader of chats for the model in ``folder``, which is not loaded."""
        if self.too_long not in TOO_LONG:
            raise unknown("too_long", self.too_long, TOO_LONG)
        words = load_processor(folder) if sees(folder) else load_tokenizer(weights_folder(folder))
        config, ends = _config_and_ends(folder)
        room, cut = room_of(config.get_text_config()), self.too_long == "cut"
        return ChatReader(words, ends, room, self.max_length, cut, self.thinking)


def _config_and_ends(folder: Path) -> tuple[Any, list[int]]:
    """The config of the language model in ``folder``, and its end tokens."""
    if is_composed(folder):
        folder = find_target(read_json(folder / "config.json")["language_model"])
    weights = weights_folder(folder)
    config = load_config(weights)
    file = weights / "generation_config.json"
    eos = read_json(file).get("eos_token_id") if file.is_file() else None
    eos = config.get_text_config().eos_token_id if eos is None else eos
    return config, [eos] if isinstance(eos, int) else list(eos or [])


@dataclass(frozen=True)
class Source(Data):
    """Settings for chats or, for text models, texts; the target itself answers or continues a share
    ``drawn`` of them.
    """

    text: list[Path]
    chats: bool
    rows: Count | None
    drawn: Share
    answer_tokens: Count

    def lessons(self, begun: Begun) -> Lessons:
        """The data of a drafter's training; the first process generates the drawn part.

        Raises ``ValueError`` for settings that do not suit the model, and without any data.
        """
        settings = {"data": self.data.places, "text": self.text, "chats": self.chats}
        sources = [name for name, value in settings.items() if value]
        if len(sources) > 1:
            raise ValueError(f"give {sources[0]} or {sources[1]}, not both")
        if sees(begun.folder) and sources != ["data"]:
            got = f"{sources[0]}, which is for models that read text alone" if sources else "none"
            raise ValueError(f"data must be chats that show pictures, got {got}")
        with one_first():
            return self._chats(begun) if sources == ["data"] else self._texts(begun)

    def _chats(self, begun: Begun) -> Lessons:
        """Training data from chats, a share of them with the target's own answers."""
        training = begun.training
        load = lambda: begun.target  # noqa: E731
        opened = self.opened(begun.folder, load, training.out, training.seed, self.drawn == 1)
        rows = opened.rows(self.rows)
        if self.drawn:
            spool = Spool(training.out)
            inputs = (begun.pipeline("auto"), opened.reader, rows, self.drawn, self.answer_tokens)
            for chat in answered(*inputs, training.out):
                spool.add(chat)
            rows = spool
        lengths = array("q", (chat.length for chat in rows))
        return replace(lessons_of(opened, rows, training.scenes), lengths=lengths)

    def _texts(self, begun: Begun) -> Lessons:
        """Training data from texts; the last share of given texts is held out."""
        words, target = begun.tokenizer, begun.target
        out, seed, scenes = begun.training.out, begun.training.seed, begun.training.scenes
        count = self.rows or TEXT_ROWS
        room = target.family.room - 1
        length = min(LENGTH, room)
        if self.chats:
            drawn = drawn_chats(begun.pipeline(), count + scenes, length, out, seed)
            starts = torch.arange(0, count * length, length)
            rows, held_out = Rows(drawn.flatten(), starts, length), drawn[count:]
        else:
            stream = text_stream(words, out, self.text)
            if self.text:
                stream, held_out = split(stream, self.held_out, length, PROMPT)
            else:
                held_out = text_stream(words, out, held_out=True)
            held_out = windows(held_out, 0, scenes, PROMPT, seed)
            rows = Rows.of(stream, count, length, seed)
            if drawn_count := round(self.drawn * count):
                beginnings = rows[:drawn_count][:, : length // 4]
                rows = rows.after(drawn_rows(target, beginnings, length, (0.0, 1.0), out, seed))
        prompt = VLMPrompt(padded(held_out[:, :PROMPT].tolist()), min(LONGEST, room - PROMPT))
        key = key_of(row.numpy().tobytes() for row in rows)
        return Lessons(rows, key, read_rows, rows.said, prompt, _config_and_ends(begun.folder)[1])


def lessons_of(opened: Conversations, rows: Sequence[Any], scenes: int) -> Lessons:
    """The data of a drafter's training from ``rows``; measured on ``scenes`` held-out questions."""
    key = key_of(chat.said for chat in rows)
    reader = opened.reader
    prompt = opened.prompts(scenes)
    return Lessons(rows, key, opened.read, partial(reader.said, rows), prompt, reader.stops)


def key_of(rows: Iterable[bytes]) -> str:
    """A digest of ``rows``."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(hashlib.sha256(row).digest())
    return sha.hexdigest()[:16]


def read_rows(rows: Sequence[Tensor]) -> tuple[VLMPrompt, Tensor]:
    """``rows`` of text [L] as one batch, in which all tokens are learnt."""
    ids = torch.stack(list(rows)).long()
    return VLMPrompt({"input_ids": ids}, 1), torch.ones_like(ids, dtype=torch.bool)
