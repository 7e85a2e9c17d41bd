"""What drafters learn from, as recipes' settings name it: chats, texts, or what a target makes up.

Shape letters: R rows, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specmm.checkpoints import read_json
from specmm.hf.families import room_of
from specmm.hf.pretrained import (
    find_target,
    load_config,
    load_target,
    load_tokenizer,
    weights_folder,
)
from specmm.hf.prompt import VLMPrompt, padded
from specmm.hf.target import VLMTarget
from specmm.processors import Processor
from specmm.recipes.answers import answered
from specmm.recipes.chat_tokens import ChatReader
from specmm.recipes.conversations import LONGEST, Conversations, Opening, Spool
from specmm.recipes.recipe import Amount, Count, Places, Share
from specmm.recipes.training.drawn_rows import drawn_chats, drawn_rows, frequent
from specmm.recipes.training.msd import Read
from specmm.recipes.training.small_qwen import LENGTH
from specmm.recipes.training.texts import rows_of, split, text_stream, windows
from specmm.registry import unknown
from specmm.text.pipeline import TextPipeline
from specmm.vlm.loading import is_composed, load_model, load_processor
from specmm.vlm.pipeline import VQAPipeline

TOO_LONG = ("skip", "cut")
TEXT_ROWS = 1536  # where a recipe names no number
PROMPT = 64  # tokens of a text's beginning that is continued to measure acceptance


@dataclass(frozen=True)
class Data:
    """Chats: files or folders of them, and how they are read."""

    data: Places
    held_out: Share
    max_length: Count | None
    too_long: str
    thinking: bool | None

    def opened(
        self, folder: Path, load: Callable[[], VLMTarget], out: Path, seed: int
    ) -> Conversations:
        """The chats for the model in ``folder``, which is loaded where they need it.

        Raises ``ValueError`` where none can be used.
        """
        if not self.data.places:
            raise ValueError("data must be files or folders of chats, got none; give data=FILE")
        opening = Opening(self.reader(folder), load, out, self.held_out, seed)
        found: Conversations = self.data(opening)
        return found

    def reader(self, folder: Path) -> ChatReader:
        """What reads chats for the model in ``folder``, which is not loaded."""
        if self.too_long not in TOO_LONG:
            raise unknown("too_long", self.too_long, TOO_LONG)
        words = load_processor(folder) if sees(folder) else load_tokenizer(weights_folder(folder))
        config, ends = _known(folder)
        room, cut = room_of(config.get_text_config()), self.too_long == "cut"
        return ChatReader(words, ends, room, self.max_length, cut, self.thinking)


def sees(folder: Path) -> bool:
    """Whether the model in ``folder`` reads pictures."""
    return is_composed(folder) or hasattr(load_config(weights_folder(folder)), "vision_config")


def _known(folder: Path) -> tuple[Any, list[int]]:
    """The config of the language model in ``folder``, and its end tokens."""
    if is_composed(folder):
        folder = find_target(read_json(folder / "config.json")["language_model"])
    place = weights_folder(folder)
    config = load_config(place)
    file = place / "generation_config.json"
    told = read_json(file).get("eos_token_id") if file.is_file() else None
    told = config.get_text_config().eos_token_id if told is None else told
    return config, [told] if isinstance(told, int) else list(told or [])


@dataclass(frozen=True)
class Lessons:
    """What a drafter of ``target`` learns from: ``rows``, of which ``read`` makes batches; ``said``
    tells how often each token [V] is one to draft. ``prompts``, held out, end with ``ends``.
    """

    target: VLMTarget
    rows: Sequence[Any] | Tensor
    read: Read
    said: Callable[[], Tensor]
    prompts: Callable[[int], VLMPrompt]
    ends: Sequence[int]

    def tokens(self, block: int) -> tuple[Tensor, Tensor]:
        """All rows [R, L], after the longest of which there is room for a ``block``, and which of
        their tokens are learnt [R, L].
        """
        read = [self.read(self.rows[i : i + 1]) for i in range(len(self.rows))]
        width = max(prompt.input_ids.shape[1] for prompt, _ in read)
        width += 0 if all(bool(learnt.all()) for _, learnt in read) else block
        both = ((prompt.input_ids[0], learnt[0]) for prompt, learnt in read)
        found = ([F.pad(x, (0, width - len(x))) for x in pair] for pair in both)
        ids, learnt = zip(*found, strict=True)
        return torch.stack(ids), torch.stack(learnt)

    def vocabulary(self, most: int) -> Tensor | None:
        """The ``most`` frequent tokens, or all that occur where they are fewer; None for 0."""
        if not most:
            return None
        said = self.said()
        return frequent(said, min(most, int((said > 0).sum())))


@dataclass(frozen=True)
class Source(Data):
    """Chats, or texts for models that read text alone; the target itself answers or continues a
    share ``drawn`` of them.
    """

    text: list[Path]
    chats: bool
    rows: Count | None
    drawn: Share
    answer_tokens: Count
    epochs: Amount | None

    def lessons(
        self,
        folder: Path,
        out: Path,
        seed: int,
        scenes: int,
        load: Callable[[], VLMTarget] | None = None,
    ) -> Lessons:
        """All that is learnt for the model in ``folder``, which ``load`` loads; ``scenes`` of it
        are held out.

        Raises ``ValueError`` for settings of another kind of model, and where nothing is to learn.
        """
        settings = {"data": self.data.places, "text": self.text, "chats": self.chats}
        given = [name for name, value in settings.items() if value]
        if len(given) > 1:
            raise ValueError(f"give {given[0]} or {given[1]}, not both")
        if sees(folder) and given != ["data"]:
            found = f"{given[0]}, which is for models that read text alone" if given else "none"
            raise ValueError(f"data must be given of chats that show pictures, got {found}")
        load = cache(load or partial(load_frozen, folder))
        if given == ["data"]:
            return self._chats(folder, load, out, seed)
        return self._texts(folder, load(), out, seed, scenes)

    def steps(self, rows: Sequence[Any] | Tensor, batch: int, steps: int) -> int:
        """Steps of so many epochs of ``rows``, where epochs are given."""
        return math.ceil(self.epochs * len(rows) / batch) if self.epochs else steps

    def _chats(self, folder: Path, load: Callable[[], VLMTarget], out: Path, seed: int) -> Lessons:
        opened = self.opened(folder, load, out, seed)
        rows = opened.rows(self.rows)
        if self.drawn:
            kind = VQAPipeline if sees(folder) else TextPipeline
            pipe = kind.from_pretrained(folder, method="auto")
            kept = Spool(out)
            for chat in answered(pipe, opened.reader, rows, self.drawn, self.answer_tokens, out):
                kept.add(chat)
            rows = kept
            del pipe
        said = partial(opened.reader.said, rows)
        return Lessons(load(), rows, opened.read, said, opened.prompts, opened.reader.stops)

    def _texts(self, folder: Path, target: VLMTarget, out: Path, seed: int, scenes: int) -> Lessons:
        """Rows of texts; of given ones the last share is held out."""
        words = load_tokenizer(weights_folder(folder))
        count = self.rows or TEXT_ROWS
        room = target.family.room - 1
        length = min(LENGTH, room)
        if self.chats:
            pipe = TextPipeline.from_pretrained(folder)
            rows = drawn_chats(pipe, count + scenes, length, out, seed)
            rows, held = rows[:count], rows[count:]
        else:
            stream = text_stream(words, out, self.text)
            if self.text:
                stream, held = split(stream, self.held_out, length, PROMPT)
            else:
                held = text_stream(words, out, held_out=True)
            held = windows(held, 0, scenes, PROMPT, seed)
            rows = rows_of(stream, count, length, seed)
            if own := round(self.drawn * count):
                beginnings = rows[:own, : length // 4]
                drawn = drawn_rows(target, beginnings, length, (0.0, 1.0), out, seed)
                rows = torch.cat([drawn, rows[own:]])
        prompts = VLMPrompt(padded(held[:, :PROMPT].tolist()), min(LONGEST, room - PROMPT))
        said = partial(torch.bincount, rows.flatten().long())
        return Lessons(target, rows, read_rows, said, lambda count: prompts, _known(folder)[1])


def load_frozen(folder: Path) -> VLMTarget:
    """The model in ``folder`` that is learnt from."""
    if sees(folder):
        model = load_model(folder, torch.float32)
    else:
        model, _ = load_target(folder, torch.float32)
    return VLMTarget(model, Processor(), str(folder))


def read_rows(rows: Sequence[Tensor]) -> tuple[VLMPrompt, Tensor]:
    """``rows`` of text [L] as one batch, of which all tokens are learnt."""
    ids = torch.stack(list(rows)).long()
    return VLMPrompt({"input_ids": ids}, 1), torch.ones_like(ids, dtype=torch.bool)
